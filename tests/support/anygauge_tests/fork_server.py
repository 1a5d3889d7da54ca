"""Processes that start with everything imported: they are forked from one that has done so.

A new worker imports torch, Megatron and transformers for five to eight seconds of a processor, which is most
of what a test with workers costs. The *warm process* imports them once. What is forked from it looks
like a process that was just started: session, environment, directory, descriptors and arguments are its own,
it runs a module as ``python -m`` does, and its parent is who asked for it, so that waiting, killing and dying
together work as ever.

It does not show that the imports work, and it has the seed of its hashes in common with the others: some
tests start cold ones. Linux alone: there a process can ask to be the parent of orphans.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from anygauge.distributed import child_process
from anygauge.distributed.garbage import freeze_living_objects
from anygauge.distributed.lifetime import die_with
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import load_plugins

__all__ = ["SCORER", "ForkServers", "ForkedProcess", "forked_workers", "running", "serve", "use"]

_MODULES = (
    "anygauge.cli.train",
    "anygauge.engines.megatron.engine",
    "anygauge.serving.embedded.engine",
    "anygauge_tests.fake_engine.server",
    "anygauge_tests.workers",
    "anygauge.trainer.actors",
    "anygauge.trainer.run",
    "anygauge.trainer.start",
    "anygauge.runtime.worker",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Modules that workers and their drivers import, without those that these import."""
_READ_ENVIRONMENT = {"huggingface_hub.constants"}
"""Modules whose values are those of the environment that they were imported in."""
_ROLE = "actor"
_TIMEOUT_S = 1800.0
"""Timeout of collectives, unless the run that takes a process sets another."""
_WORKER = "anygauge.runtime.worker_main"
SCORER = "anygauge.rollout.rewards.process"
"""The module of a process of rewards."""
_FIRST = 3
"""Descriptor after those of standard input, output and error."""
_MESSAGE_BYTES = 1 << 17
_MAX_DESCRIPTORS = 16
_IMPORT_S, _FORK_S = 240.0, 60.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Command to run in a forked process."""

    module: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    directory: str
    path: Sequence[str]
    numbers: Sequence[int]
    """Numbers of the descriptors that come with the request, in order."""
    new_session: bool
    has_own: bool
    """Whether a warm process goes with it."""


class ForkedProcess:
    """A forked process, with what is used here of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()
        """Only one thread may wait for the process: the exit code can be had once."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` while the process runs."""
        with self._lock:
            return self._poll()

    def _poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        :raises subprocess.TimeoutExpired: It runs on after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._lock:
            if self._poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


class ForkServers:
    """The warm process, started with the first that is forked from it; it ends with this process.

    :param backend: Name of the one that workers are prepared for; ``None`` for processes that are no workers.
    :param modules: What is imported; ``None`` for what workers and drivers need.
    """

    def __init__(self, backend: str | None, modules: Sequence[str] | None = None) -> None:
        self._backend = backend or ""
        self._modules = _MODULES if modules is None else modules
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._is_warm = False
        self._socket: socket.socket

    def prepare(self) -> None:
        """Start to import; the first :meth:`start` waits for it."""
        if self._process is None:
            self._servers()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        output: int,
        errors: int | None = None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        directory: str | None = None,
        stdin: int = subprocess.DEVNULL,
        new_session: bool = True,
        has_own: bool = False,
    ) -> ForkedProcess:
        """Start what ``python -P -m MODULE ARGUMENTS`` would.

        :param module: Or the path of a script.
        :param output: Descriptor that standard output goes to.
        :param errors: That standard error goes to; ``None`` is the same.
        :param pass_fds: Further descriptors that it gets, under the same numbers.
        :param env: Its whole environment; ``None`` is that of this process.
        :param directory: That it starts in; ``None`` is that of this process.
        :param stdin: ``PIPE`` or ``DEVNULL``, as of :class:`subprocess.Popen`.
        :param new_session: Whether it leads a session of its own.
        :param has_own: Whether it gets a warm process too, which the workers that it starts are forked from.
        """
        with self._lock, ExitStack() as stack:
            reading, writing = _standard_input(stdin)
            stack.enter_context(reading)
            self.prepare()
            if not self._is_warm:
                self._answer(_IMPORT_S)
                self._is_warm = True
            request = _Request(
                module=module,
                arguments=arguments,
                env=dict(os.environ if env is None else env),
                directory=str(Path.cwd()) if directory is None else directory,
                path=[entry for entry in sys.path if entry],
                numbers=[0, 1, 2, *pass_fds],
                new_session=new_session,
                has_own=has_own,
            )
            given = [reading.fileno(), output, output if errors is None else errors, *pass_fds]
            _adopt_orphans(True)
            try:
                socket.send_fds(self._socket, [pickle.dumps(request)], given)
                return ForkedProcess(int(self._answer(_FORK_S)), writing)
            finally:
                _adopt_orphans(False)

    @classmethod
    def forked(cls) -> ForkServers:
        """Return those of a copy of this process, which has one thread still."""
        processes = cls(None)
        processes._socket, theirs = _connection()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            die_with(parent)
            processes._socket.close()
            _serve(theirs)
        theirs.close()
        processes._process = ForkedProcess(pid)
        processes._is_warm = True
        return processes

    @property
    def is_ready(self) -> bool:
        """Return whether everything is imported, or seems to be."""
        return self._is_warm

    def _servers(self) -> None:
        self._socket, theirs = _connection()
        arguments = (str(theirs.fileno()), str(os.getpid()), self._backend, *self._modules)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", f"from {__name__} import serve; serve()", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # one thread: what a library starts at its import would not be there after a fork
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )

    def _answer(self, limit_s: float) -> bytes:
        self._socket.settimeout(limit_s)
        answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("The process that others are forked from has ended; what it said is above.")
        return answer

    def close(self) -> None:
        """End the warm process; those forked from it go on."""
        process, self._process, self._is_warm = self._process, None, False
        if process is not None:
            self._socket.close()
            process.kill()
            process.wait()


def _connection() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_BYTES)
    return ours, theirs


def _standard_input(kind: int) -> tuple[IO[bytes], IO[bytes] | None]:
    """Return the end that a process reads, and the other one, if there is one."""
    if kind != subprocess.PIPE:
        return Path(os.devnull).open("rb"), None
    reading, writing = os.pipe()
    return open(reading, "rb"), open(writing, "wb", buffering=0)


def _adopt_orphans(wanted: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


_used: list[ForkServers] = []


def use(*processes: ForkServers) -> None:
    """Let what this process starts be forked by these, or by none."""
    _used[:] = processes


def running() -> ForkServers | None:
    """Return what can fork processes for this one at once, if there is anything."""
    return next((processes for processes in _used if processes.is_ready), None)


@contextmanager
def forked_workers(processes: ForkServers, scorers: ForkServers | None = None) -> Iterator[None]:
    """Let local workers be forked.

    :param scorers: Forks processes of rewards, which import neither torch nor Megatron; ``None`` starts them
        as a user's are.
    """

    def start(command: Sequence[str], **options: Any) -> Any:
        module, arguments = command[4], command[5:]
        forks = {_WORKER: processes, SCORER: scorers}.get(module)
        if forks is None:
            return subprocess.Popen(command, **options)
        given = {name: options[name] for name in ("env", "pass_fds", "stdin")}
        return forks.start(module, arguments, output=options["stdout"], has_own=module == _WORKER, **given)

    vars(child_process)["Popen"] = start
    try:
        yield
    finally:
        vars(child_process)["Popen"] = subprocess.Popen


# -------------------------------------------------------------------------
# The warm process
# -------------------------------------------------------------------------


def serve() -> NoReturn:
    """Import, then fork a process for each request."""
    descriptor, parent, backend, *modules = sys.argv[1:]
    die_with(int(parent))
    faulthandler.enable()  # in what is forked too, each to its own standard error
    connection = socket.socket(fileno=int(descriptor))
    if backend:
        _prepare(backend)
    for module in modules:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"An import has started {threads - 1} threads, and a fork would lose them.")
    freeze_living_objects()  # a collection in a fork would touch, and so copy, every page
    connection.send(b"ready")
    _serve(connection)


def _serve(connection: socket.socket) -> NoReturn:
    while True:
        message, given, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        pid = _fork_twice()
        if not pid:
            connection.close()
            _become(pickle.loads(message), given)
        for each in given:
            os.close(each)
        connection.send(str(pid).encode())


def _prepare(name: str) -> None:
    plugins = load_plugins()
    backend = plugins.get("register_backends", name)
    network: dict[str, Any] = {"interface": None, "ip_version": "any", "timeout_s": _TIMEOUT_S}
    env = plugins.worker_env(backend, role=_ROLE, deterministic=False, **network)
    os.environ.update(env)
    plugins.prepare_worker(backend, _ROLE, "before_vendor_import")
    prepare_megatron(plugins, backend)
    plugins.named("register_models")  # imports them


def _fork_twice() -> int:
    """Fork a process whose parent is that of this one. Return 0 in it, and its id here once that is so."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with open(reading, "rb") as pipe:
            pid = int(pipe.read())
        os.waitpid(between, 0)
        return pid
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    while os.getppid() == between:
        time.sleep(0.0005)
    return 0


def _become(request: _Request, given: Sequence[int]) -> NoReturn:
    """Be the process that was asked for."""
    if request.new_session:
        os.setsid()
    _renumber(given, request.numbers)
    os.environ.clear()
    os.environ.update(request.env)
    for name in _READ_ENVIRONMENT & sys.modules.keys():
        importlib.reload(sys.modules[name])
    os.chdir(request.directory)
    sys.path[:] = request.path
    sys.argv[:] = [request.module, *request.arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    use(*([ForkServers.forked()] if request.has_own else []))
    with forked_workers(*_used) if _used else nullcontext():
        code = _run(request.module)
    _exit(code)


def _renumber(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number, whatever numbers they have now."""
    copies, wrong = [], []
    for each in descriptors:
        while (copy := fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST)) in numbers:
            wrong.append(copy)  # and would be overwritten below
        copies.append(copy)
    for each in (*descriptors, *wrong):
        os.close(each)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number, inheritable=True)
        os.close(copy)


def _run(module: str) -> int:
    """Run a module as the main one and return the exit code of the process."""
    sys.modules.pop(module, None)  # its package may have imported it
    try:
        if module.endswith(".py"):
            sys.path.insert(0, str(Path(module).parent))  # as for every script
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - the outermost frame of a process
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _exit(code: int) -> NoReturn:
    """End in order, but leave what was imported as it is: taking it apart would copy all of it."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
