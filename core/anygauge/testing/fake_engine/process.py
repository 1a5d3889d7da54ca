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
from typing import Any

from anygauge.testing.fake_engine.options import Options
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.weights import WeightApi, WeightPeer

__all__ = ["FakeServer"]

_START_S = 60.0
_ASK_S = 10.0


class FakeServer:
    """An :class:`~anygauge_hooks.rollout.EngineServer` whose engine is fake. It dies with this process.

    Example::

        with FakeServer(Options(token_s=0.0005, slots=8)) as server:
            address = server.address
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.address = ""
        self.encoders: Sequence[str] = ()
        """That it was told when it was started."""
        self._process: subprocess.Popen[bytes] | None = None

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

    def start(self, encoders: Sequence[str] = ()) -> str:
        """Start the process, or start it again after its end, and return its address.

        :raises RolloutError: It ended before it served.
        """
        self.close()
        self.encoders = encoders
        self._process = subprocess.Popen(self._command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.address = self._read_address(self._process)
        return self.address

    def _command(self) -> list[str]:
        # The kernel watches the thread that starts a child: a thread that may end early must not count.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        command = [
            sys.executable,
            "-P",
            "-m",
            "anygauge.testing.fake_engine",
            "--lifeline",
            "--parent",
            str(parent),
        ]
        for field in fields(Options):
            value = getattr(self.options, field.name)
            if value is True:
                command.append(f"--{field.name.replace('_', '-')}")
            elif value is not False and value != field.default:
                command.append(f"--{field.name.replace('_', '-')}={value}")
        return command

    @staticmethod
    def _read_address(process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            process.kill()
            raise RolloutError(f"The fake engine did not start: exit code {process.wait()}.")
        return str(json.loads(line)["address"])

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def facts(self) -> Mapping[str, str]:
        """Return what it is, for the run's records."""
        found = {"version": f"fake {self.options.sglang}", "command": " ".join(self._command()), "log": ""}
        if self.options.dp_size > 1:
            found["ranks"] = str(self.options.dp_size)
        if self.options.disaggregation == "prefill":
            found["bootstrap"] = self.address.removeprefix("http://")
        return found

    def weight_peer(self) -> WeightPeer:
        """Return how its version takes weights."""
        is_old = self.options.sglang == "0.5.17"
        api = WeightApi(has_session=not is_old, retracted_survive_flush=not is_old, checksums="sha256")
        return WeightPeer(address=self.address, tensor_parallel=self.options.tp_size, api=api)

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
        if process is None:
            return
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    # ---- what the real server has not ----

    def fault(self, kind: str, event: str = "generate", count: int = 0, argument: float = 0.0) -> None:
        """Let something go wrong: see :class:`~anygauge.testing.fake_engine.faults.Fault`. 0 is now."""
        body = {"kind": kind, "event": event, "count": count, "argument": argument}
        self._ask("/fake/fault", json.dumps(body).encode())

    def state(self) -> dict[str, Any]:
        """Return requests, slots, gates and counts of events."""
        found: dict[str, Any] = self._ask("/fake/state")
        return found

    def _ask(self, path: str, data: bytes | None = None) -> Any:
        with urllib.request.urlopen(self.address + path, data, timeout=_ASK_S) as answer:
            return json.load(answer)
