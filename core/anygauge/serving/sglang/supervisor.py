"""Supervisor of a server, its parent process: ends the server's processes and removes its leftovers.

A server is several processes, which may outlive each other, and it leaves files in shared memory. The
supervisor imports little and only waits: for the end of the server, for the command to end it, or for the end
of the worker, whose pipe is its standard input.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from anygauge.distributed.lifetime import adopt_orphans, end_children

__all__ = ["LOOK", "RELEASE", "STOP", "SUPERVISOR", "supervisor_command"]

SUPERVISOR = "ANYGAUGE_SGLANG_SUPERVISOR"
"""Environment variable of a server: the process that it must not outlive."""
STOP, LOOK, RELEASE = b"stop\n", b"look\n", b"free\n"
"""Commands on the supervisor's standard input, of one length. ``STOP`` ends a server gracefully; closing the
pipe without it kills the server. ``LOOK`` asks for an inspection once the server serves, and is answered by
the same word on standard output. ``RELEASE`` closes the server's own standard input, for which a server waits
whose devices are not free yet. The log is standard error."""
SHARED_MEMORY = Path("/dev/shm")
OPENED, STAMPED = "sglang_", ("sgl_shm_", "multi_tokenizer_args_")
"""How SGLang begins the names of files in shared memory: of those that its processes keep open, and of those
whose names hold the number of the process that made them."""
LOOK_EVERY_S = 1.0
_LIFELINE = 0


def supervisor_command(server: Sequence[str], *, grace_s: float) -> list[str]:
    """Return the command that runs a server under its supervisor.

    :param server: The server's own command.
    :param grace_s: Seconds from the command to stop until the kill.
    """
    return [sys.executable, "-m", __spec__.name, str(grace_s), *server]


class _Traces:
    """Processes and shared-memory files of a server on the host."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.files: set[Path] = set()

    def look(self) -> None:
        """Note what there is now."""
        now = {child.pid for child in psutil.Process().children(recursive=True)}
        self.pids |= now
        self.files |= _opened(now)

    def remove(self) -> None:
        """Remove the files of the processes that were noted, which have ended."""
        for path in self.files | set(_stamped(self.pids)):
            path.unlink(missing_ok=True)


def _opened(pids: Iterable[int]) -> set[Path]:
    paths = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    paths.add(link.readlink())
    return {path for path in paths if path.parent == SHARED_MEMORY and path.name.startswith(OPENED)}


def _stamped(pids: set[int]) -> Iterable[Path]:
    """Yield ``sgl_shm_KIND_PID_RANDOM`` and ``multi_tokenizer_args_PID`` of these processes."""
    with suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            parts = path.name.split("_")
            pid = parts[-2] if path.name.startswith(STAMPED[0]) else parts[-1]
            if path.name.startswith(STAMPED) and pid.isdecimal() and int(pid) in pids:
                yield path


def keep(command: Sequence[str], grace_s: float) -> int:
    """Run a server to its end, clean up after it, and return its exit status."""
    adopt_orphans()
    wake = _wake_on_signals()
    scratch = tempfile.mkdtemp(prefix="anygauge-sglang-")  # SGLang never removes its sockets
    environment = {**os.environ, SUPERVISOR: str(os.getpid()), "TMPDIR": scratch}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), env=environment)
    traces = _Traces()
    try:
        if _wait(server, wake, traces):
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(timeout=grace_s)
    finally:
        traces.look()
        server.kill()
        status = server.wait()
        end_children()
        traces.remove()
        shutil.rmtree(scratch, ignore_errors=True)
    return status


def _wake_on_signals() -> int:
    """Return a descriptor that gives the numbers of the signals that arrive."""
    source, sink = os.pipe()
    for descriptor in (source, sink):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return source


def _wait(server: subprocess.Popen[bytes], wake: int, traces: _Traces) -> bool:
    """Wait for a reason to end, and return whether the server may do so in peace."""
    while server.poll() is None:
        pause = None if traces.files else LOOK_EVERY_S  # of a server that is up, all that stays is noted
        ready, _, _ = select.select([_LIFELINE, wake], [], [], pause)
        if _LIFELINE in ready:
            word = os.read(_LIFELINE, len(STOP))
            traces.look()
            if word == RELEASE and server.stdin is not None:
                server.stdin.close()
            elif word == LOOK:
                with suppress(OSError):  # the worker is gone
                    os.write(1, LOOK)
            else:
                return word == STOP
        if wake in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(wake, 64)):
            traces.look()
            return True
        if not traces.files:
            traces.look()
    return False


if __name__ == "__main__":
    _status = keep(sys.argv[2:], float(sys.argv[1]))
    sys.exit(_status if _status >= 0 else 128 - _status)
