"""Diagnose a worker that does not answer: its stacks and the end of its log."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

__all__ = ["dump_stacks", "enable_stacks", "log_size", "tail"]

STACKS_SIGNAL = signal.SIGUSR1
TAIL_BYTES = 8192
TAIL_LINES = 40
STACKS_TIMEOUT_S = 5.0
SETTLED_S = 0.2
"""A log that has grown and then stays the same for so long is complete."""
STDERR = 2


def enable_stacks() -> None:
    """Let this process write its stacks to its standard error when it crashes, and when it is asked to."""
    faulthandler.enable(file=STDERR)
    faulthandler.register(STACKS_SIGNAL, file=STDERR, all_threads=True)


def dump_stacks(pid: int, log: Path) -> str:
    """Return the stacks of all threads of a process of this host.

    The process needs no interpreter time for it, so this works in the middle of a collective too.

    :param pid: A process that has called :func:`enable_stacks`; another one would be ended by the signal.
    :param log: Where its standard error goes.
    """
    start = size = log_size(log)
    os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + STACKS_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        before, size = size, log_size(log)
        if start < size == before:
            break
    return _read(log, start).rstrip()


def log_size(log: Path) -> int:
    """Return the size of a log in bytes; 0 if there is none yet."""
    return log.stat().st_size if log.exists() else 0


def tail(log: Path, start: int = 0) -> str:
    """Return the last lines of a log.

    :param start: Nothing before this byte.
    """
    lines = _read(log, max(start, log_size(log) - TAIL_BYTES)).splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def _read(log: Path, start: int) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
