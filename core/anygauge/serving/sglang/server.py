"""SGLang server on this host: start, health checks, restart, stop."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil

from anygauge.distributed.addresses import in_url
from anygauge.failures import on_failure
from anygauge.serving.server_plan import plan_servers
from anygauge.serving.sglang.arguments import (
    by_name,
    command_line,
    media_arguments,
    media_environment,
    run_arguments,
)
from anygauge.serving.sglang.client import running_limit
from anygauge.serving.sglang.installed import Installed, installed_sglang, missing
from anygauge.serving.sglang.keys import key_variable, own_keys
from anygauge.serving.sglang.kinds import plan_arguments, plan_ranks
from anygauge.serving.sglang.launch import BACKEND, HOLD, ROLE
from anygauge.serving.sglang.supervisor import LOOK, RELEASE, STOP, supervisor_command
from anygauge.serving.sglang.versions import ServerApi, find_api
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.weight_sync.control import EngineControl
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.sglang import ServerKeys

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge.serving.server_plan import ServerPlan
    from anygauge_hooks.engines import WorkerContext

__all__ = ["ENGINE", "SGLangServer", "make_server"]

ENGINE = "sglang"
ADAPTER = "policy"
"""Name of the adapter that requests ask for."""
GRACE_S = 3.0
"""Seconds from the command to stop until the kill; SGLang looks for it every few seconds."""
KILL_S = 30.0
"""Seconds for the supervisor to end after the server, and to remove its leftovers."""
POLL_S = 0.2
ANSWER_S = 10.0
"""For one answer of a server that starts."""
LOG_LINES = 40
"""Lines from the end of a log that errors show."""
TRIES = 3
"""Attempts at a free port: another process may take one between the choice and the server's own listening."""
ANSWER_ONCE = {"SGLANG_FORCE_STREAM_INTERVAL": str(2**31 - 1)}
"""SGLang's variable: tokens of a response after which its scheduler reports them, at the cost of an answer in
the front end. It serves SGLang's metric of the first token; nobody reads a response before its end."""
_TAKEN = ("address already in use", "port is already in use", "eaddrinuse")

_log = logging.getLogger(__name__)


class _Ports(NamedTuple):
    http: int
    collectives: int
    bootstrap: int


class SGLangServer:
    """An ``EngineServer``: SGLang in processes of its own, which end with this one."""

    def __init__(
        self,
        *,
        arguments: Mapping[str, Any],
        installed: Installed,
        api: ServerApi,
        device_type: str,
        environment: Mapping[str, str],
        keys: ServerKeys,
        host: str,
        log: Path,
        deadline_s: float,
        ranks: int = 1,
        adapter: str = "",
    ) -> None:
        """Store the arguments of a server, without starting it.

        :param arguments: Arguments without those of addresses and ports.
        :param keys: Keys that the server asks for from then on.
        :param host: Address of this node that it listens on.
        :param deadline_s: Longest time until it answers, in seconds.
        :param ranks: Data-parallel ranks that the arguments ask for.
        :param adapter: Name of the adapter that it gets; see :class:`SGLangPeer`.
        """
        self.api = api
        self.log = log
        self._arguments = dict(arguments)
        self._installed = installed
        self._device_type = device_type
        self._environment = {**environment, **key_variable(keys)}
        self._keys = keys
        self._host = host
        self._deadline_s = deadline_s
        self._ranks = ranks
        self._adapter = adapter
        self._encoders: Sequence[str] = ()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._ports: _Ports | None = None
        """Ports of a process that has begun, and is yet to be waited for."""
        self._address = ""
        self._running_limit: int | None = None
        """Most requests that a data-parallel rank runs at once; ``None`` before it has answered."""
        self._bootstrap: int | None = None
        self._log_start = 0
        """Where the log of the process begins."""
        self._began = 0.0
        """When the process began, in the seconds of :func:`time.monotonic`."""

    def begin(self, *, hold: bool) -> None:
        """Start the process and return; see :class:`anygauge_hooks.serving.SupportsEarlyStart`."""
        with on_failure(self.close):
            self._ports = self._launch(hold=hold)

    def start(self, encoders: Sequence[str] = ()) -> str:
        """Start the server and return its address; see :class:`anygauge_hooks.serving.EngineServer`."""
        if self._ports is None:
            self.close()
        self._encoders = encoders
        deadline = monotonic() + self._deadline_s
        for left in reversed(range(TRIES)):
            try:
                with on_failure(self.close):
                    return self._start(deadline)
            except RolloutError:
                if not (left and _lost_a_port(self.log, self._log_start)):
                    raise
                _log.warning("a port was taken before the server listened on it; it is started again")
        raise AssertionError("the last try returns or raises")

    def is_alive(self) -> bool:
        """Return whether the process runs; it may hang nevertheless."""
        return self._supervisor is not None and self._supervisor.poll() is None and self._server() is not None

    def facts(self) -> Mapping[str, str]:
        """Return facts for the run's records.

        ``version`` is the listed one that it is spoken to as, ``installed`` its own.
        """
        server = self._server()
        return {
            "version": self.api.version,
            "installed": self._installed.version,
            "command": " ".join(self._command),
            "log": str(self.log),
            "address": self._address,
            "pid": str(server.pid) if server else "",
            "ranks": str(self._ranks),
        }

    def peer(self) -> SGLangPeer:
        """Return how other processes speak to it; see :class:`anygauge_hooks.serving.EngineServer`."""
        return SGLangPeer(
            address=self._address,
            tensor_parallel=int(self._arguments.get("tp_size", 1)),
            data_parallel=self._ranks,
            max_running_requests=self._running_limit,
            bootstrap="" if self._bootstrap is None else f"{self._host}:{self._bootstrap}",
            device=self._device_type,
            api=self.api.weights(self._device_type),
            keys=self._keys,
            adapter=self._adapter,
        )

    def close(self) -> None:
        """End the server's processes and remove their leftovers. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        self._ports = None
        if supervisor is None:
            return
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        with suppress(OSError, ValueError):  # it has ended already, or the pipe has
            supervisor.stdin.write(STOP)
            supervisor.stdin.flush()
        with suppress(OSError):
            supervisor.stdin.close()
        supervisor.stdout.close()
        try:
            supervisor.wait(timeout=GRACE_S + KILL_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()  # the kernel kills the server with it
            supervisor.wait()

    def _start(self, deadline: float) -> str:
        """Wait until the server answers, having started it unless it has begun."""
        ports = self._ports or self._launch(hold=False)
        self._ports = None
        self._tell(RELEASE)
        self._await(ports.http, deadline)
        _log.info("start: server %.2f s", monotonic() - self._began)
        self._running_limit = self._read_limit()
        return self._address

    def _read_limit(self) -> int | None:
        control = EngineControl(self._address, self._keys.headers, deadline_s=ANSWER_S)
        with suppress(RolloutError, DeadlineError):  # a guess serves too
            return running_limit(control.get("/server_info", what="its limits"))
        return None

    def _launch(self, *, hold: bool) -> _Ports:
        """Start the process, and return the ports that it will listen on."""
        ports = _free_ports(self._host, self._earlier_port())
        self._command = self._command_for(ports)
        self._address = f"http://{in_url(self._host)}:{ports.http}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**self._environment, HOLD: "1"} if hold else self._environment
        self._began = monotonic()
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._note(log)
            self._supervisor = subprocess.Popen(
                supervisor_command(self._command, grace_s=GRACE_S),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # an interrupt at the terminal is for the driver to handle
            )
        return ports

    def _earlier_port(self) -> int:
        """Return where an encoder was found before, since those that ask it know no other place."""
        if not (self._arguments.get("encoder_only") and self._address):
            return 0
        return int(self._address.rpartition(":")[2])

    def _command_for(self, ports: _Ports) -> list[str]:
        placed: dict[str, Any] = {"host": self._host, "port": ports.http, "nccl_port": ports.collectives}
        if self._arguments.get("disaggregation_mode") == "prefill":
            self._bootstrap = placed["disaggregation_bootstrap_port"] = ports.bootstrap
        if self._arguments.get("language_only"):
            placed["encoder_bootstrap_port"] = ports.bootstrap
            placed["encoder_urls"] = list(self._encoders)
        words = command_line({**self._arguments, **placed}, self._installed)
        return [sys.executable, "-m", "anygauge.serving.sglang.launch", *words]

    def _note(self, log: IO[bytes]) -> None:
        log.write(f"\n$ {' '.join(self._command)}\n".encode())
        log.flush()

    def _await(self, port: int, deadline: float) -> None:
        """Return once the server answers on the port."""
        assert self._supervisor is not None
        while not (_answers(self._host, port) and self._listens(port)):
            with suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(timeout=POLL_S)
                raise self._failed(f"ended with status {self._supervisor.returncode} before it answered")
            if monotonic() > deadline:
                raise self._failed(f"did not answer within {self._deadline_s:g} s")
        self._look()

    def _look(self) -> None:
        """Have the supervisor record the server's processes and files, so that it can remove all of them."""
        self._tell(LOOK)
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        answered, _, _ = select.select([self._supervisor.stdout], [], [], ANSWER_S)
        if not answered or self._supervisor.stdout.read(len(LOOK)) != LOOK:
            raise self._failed("ended as soon as it had answered")

    def _tell(self, word: bytes) -> None:
        """Give the supervisor a command; whether it is still there shows elsewhere."""
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        with suppress(OSError):
            self._supervisor.stdin.write(word)
            self._supervisor.stdin.flush()

    def _listens(self, port: int) -> bool:
        """Return whether it is this server that listens on the port, and not another that was faster."""
        server = self._server()
        if server is None:
            return False
        with suppress(psutil.Error):
            connections = server.net_connections(kind="tcp")
            return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)
        return False

    def _server(self) -> psutil.Process | None:
        if self._supervisor is None:
            return None
        with suppress(psutil.Error):
            for child in psutil.Process(self._supervisor.pid).children():
                if child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    def _failed(self, what: str) -> RolloutError:
        return RolloutError(
            f"The SGLang server {what}; the end of {self.log}:\n{_end_of(self.log)}",
            hint="The log has all of it. A server that only needs longer: raise placement.start_timeout_s.",
        )


def make_server(config: Config, context: WorkerContext) -> SGLangServer:
    """Return the server of a worker, by its rank in the deployment, without starting it.

    :raises RolloutError: SGLang is not installed, or its version is not one that was tested.
    """
    installed = installed_sglang()
    if installed is None:
        raise missing(context.backend)
    plan = plan_servers(config)[context.rank]
    return SGLangServer(
        arguments=_arguments(config, context, plan, installed),
        installed=installed,
        api=find_api(installed.version, treat_as=config.rollout.sglang_version),
        device_type=context.backend.device_type,
        environment=_environment(config, context),
        keys=own_keys(config),
        host=context.address,
        log=_logs(config, context) / f"rollout-{context.rank}-engine.log",
        deadline_s=config.placement.start_timeout_s,
        ranks=plan_ranks(config, plan),
        adapter=ADAPTER if config.pushes_adapter else "",
    )


def _arguments(
    config: Config, context: WorkerContext, plan: ServerPlan, installed: Installed
) -> dict[str, Any]:
    """Return the arguments by name: what the user wrote counts more than the backend's, the config's most."""
    backend = context.plugins.merged(
        "rollout_engine_args", config=config, backend=context.backend, engine=ENGINE
    )
    path = None if plan.path is None else str(plan.path)
    return {
        **media_arguments(config, installed),
        **by_name(backend, installed),
        **by_name(plan_arguments(config, plan), installed),
        **run_arguments(config, path=path),
    }


def _environment(config: Config, context: WorkerContext) -> dict[str, str]:
    backend = context.backend
    backend_env = context.plugins.worker_env(
        backend,
        role=ROLE,
        deterministic=config.run.deterministic,
        interface=config.cluster.interface,
        ip_version=config.cluster.ip_version,
        timeout_s=config.run.timeout_s,
        train_engine=config.train.engine,
    )
    visible = {}
    if backend.visible_devices_env and context.accelerators:
        visible = {backend.visible_devices_env: ",".join(context.accelerators)}
    offline = {"HF_HUB_OFFLINE": "1"}  # the model is a directory
    # the server in Rust that SGLang may start instead asks for no key
    launcher_env = {BACKEND: backend.name, "PYTHONUNBUFFERED": "1", "SGLANG_RUST_SERVER": "0"}
    media = media_environment(config)
    return {**ANSWER_ONCE, **os.environ, **offline, **backend_env, **visible, **media, **launcher_env}


def _logs(config: Config, context: WorkerContext) -> Path:
    if context.logs is not None:
        return Path(context.logs)
    return config.run.directory / config.run.name / "logs"


# -------------------------------------------------------------------------
# Ports, answers, logs
# -------------------------------------------------------------------------


def _free_ports(host: str, http: int = 0) -> _Ports:
    """Return ports of this host that nobody listens on, no two of them the same.

    :param http: Port that is taken for requests if it is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def reserve(port: int) -> socket.socket:
        return stack.enter_context(socket.create_server((host, port), family=family))

    with ExitStack() as stack:
        try:
            reserved = [reserve(http)]
        except OSError:
            reserved = [reserve(0)]
        reserved += [reserve(0) for _ in _Ports._fields[1:]]
        return _Ports(*(each.getsockname()[1] for each in reserved))


def _answers(host: str, port: int) -> bool:
    """Return whether a server says that it is well."""
    control = EngineControl(f"http://{in_url(host)}:{port}", lambda _: {}, deadline_s=ANSWER_S)
    with suppress(RolloutError, DeadlineError):  # a busy host answers late, and is asked again
        control.get("/health", what="its health")
        return True
    return False


def _lost_a_port(log: Path, offset: int) -> bool:
    """Return whether what was logged from an offset on says that a port was taken."""
    with log.open("rb") as file:
        file.seek(offset)
        text = file.read().decode(errors="replace").lower()
    return any(phrase in text for phrase in _TAKEN)


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16_384))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"    {line[:400]}" for line in lines[-LOG_LINES:])
