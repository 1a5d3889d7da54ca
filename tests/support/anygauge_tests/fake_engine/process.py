"""A fake engine as a child of this process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from anygauge.serving.sglang.weights import SGLangPeer
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.sglang import ServerKeys, WeightApi
from anygauge_tests.fake_engine.options import Options
from anygauge_tests.fork_server import running

if TYPE_CHECKING:
    from anygauge_tests.fork_server import ForkedProcess, ForkServers

__all__ = ["MODULE", "FakeServer"]

MODULE = "anygauge_tests.fake_engine"
"""Module that the process runs."""
_START_S = 60.0
_ASK_S = 10.0


class FakeServer:
    """An :class:`~anygauge_hooks.rollout.EngineServer` whose engine is fake. It dies with this process.

    :param fork_servers: Forks the process from one that has imported :data:`MODULE`, where many are started.

    Example::

        with FakeServer(Options(token_s=0.0005, slots=8)) as server:
            address = server.address
    """

    def __init__(self, options: Options | None = None, *, fork_servers: ForkServers | None = None) -> None:
        self.options = options or Options()
        self.address = ""
        self.port = 0
        """Port to listen on when it starts; 0 takes a free one."""
        self.encoders: Sequence[str] = ()
        """Encoders that it was given when it started."""
        self._fork_servers = fork_servers
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._pipes: list[IO[bytes]] = []
        self._said: IO[bytes] | None = None
        """Output of a process that has begun, and is yet to be waited for."""

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Return the process id of the engine."""
        if self._process is None:
            raise RolloutError("The fake engine was not started.")
        return self._process.pid

    def begin(self, *, hold: bool) -> None:
        """Start the process, which takes no memory of a device; :meth:`start` waits for it."""
        self._said = self._launch()

    def start(self, encoders: Sequence[str] = ()) -> str:
        """Start the process, or start it again after its end, and return its address.

        :raises RolloutError: It ended before it served.
        """
        said, self._said = self._said, None
        if said is None:
            self.close()
            said = self._launch()
        self.encoders = encoders
        self.address = self._read_address(said)
        return self.address

    def _launch(self) -> IO[bytes]:
        """Start a process and return what it says."""
        fork_servers = self._fork_servers or running()
        return self._start_cold() if fork_servers is None else self._start_forked(fork_servers)

    def _start_cold(self) -> IO[bytes]:
        self._process = process = subprocess.Popen(
            self._command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._pipes = [process.stdin, process.stdout]
        return process.stdout

    def _start_forked(self, fork_servers: ForkServers) -> IO[bytes]:
        reading, writing = os.pipe()
        said = open(reading, "rb")  # noqa: SIM115 - closed with the process
        self._pipes = [said]
        try:
            arguments = [f"--parent={os.getpid()}", *self._arguments()]
            self._process = fork_servers.start(MODULE, arguments, output=writing, errors=2, new_session=False)
        finally:
            os.close(writing)
        return said

    def _command(self) -> list[str]:
        # The kernel watches the thread that starts a child: a thread that may end early must not count.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        return [sys.executable, "-P", "-m", MODULE, "--lifeline", f"--parent={parent}", *self._arguments()]

    def _arguments(self) -> list[str]:
        arguments = [f"--port={self.port}"]
        for field in fields(Options):
            value = getattr(self.options, field.name)
            if value is True:
                arguments.append(f"--{field.name.replace('_', '-')}")
            elif value is not False and value != field.default:
                arguments.append(f"--{field.name.replace('_', '-')}={value}")
        return arguments

    def _read_address(self, said: IO[bytes]) -> str:
        ready, _, _ = select.select([said], [], [], _START_S)
        # Device libraries print warnings to standard output while they are imported.
        lines = iter(said.readline if ready else bytes, b"")
        line = next((line for line in lines if line.startswith(b"{")), b"")
        if not line:
            process = self._process
            self.close()
            raise RolloutError(f"The fake engine did not start: exit code {process and process.returncode}.")
        return str(json.loads(line)["address"])

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def facts(self) -> Mapping[str, str]:
        """Return what it is, for the run's records."""
        return {"version": f"fake {self.options.sglang}", "command": " ".join(self._command()), "log": ""}

    def peer(self) -> SGLangPeer:
        """Return how its version takes weights."""
        is_old = self.options.sglang == "0.5.17"
        api = WeightApi(has_session=not is_old, retracted_survive_flush=not is_old, checksums="sha256")
        return SGLangPeer(
            address=self.address,
            tensor_parallel=self.options.tp_size,
            data_parallel=self.options.dp_size,
            bootstrap=self.address.removeprefix("http://")
            if self.options.disaggregation == "prefill"
            else "",
            api=api,
            device=self.options.device,
            adapter=self.options.adapter,
            keys=ServerKeys(api=self.options.api_key, admin=self.options.admin_api_key),
        )

    def kill(self) -> None:
        """Kill the process, as a lack of memory would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal: ``SIGSTOP`` makes it hang with its connections open, ``SIGCONT`` ends that."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        self._said = None
        if process is None:
            return
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in self._pipes:
            pipe.close()

    # ---- what the real server has not ----

    def fault(self, kind: str, event: str = "generate", count: int = 0, argument: float = 0.0) -> None:
        """Let something go wrong: see :class:`~anygauge_tests.fake_engine.faults.Fault`. 0 is now."""
        body = {"kind": kind, "event": event, "count": count, "argument": argument}
        self._request("/fake/fault", json.dumps(body).encode())

    def state(self) -> dict[str, Any]:
        """Return requests, slots, gates and counts of events."""
        state: dict[str, Any] = self._request("/fake/state")
        return state

    def _request(self, path: str, data: bytes | None = None) -> Any:
        with urllib.request.urlopen(self.address + path, data, timeout=_ASK_S) as answer:
            return json.load(answer)
