"""The driver's end of one process that scores."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from anygauge.rollout.rewards.mark import Mark, mark_file
from anygauge.rollout.rewards.messages import STACKS_SIGNAL, Ready, Results
from anygauge.rollout.rewards.work import Work

__all__ = ["Child"]

STALL_S = 60
"""Longest pause in the middle of a message, in whole seconds."""
STACKS_S = 1.0
"""For a process that hangs to write its stacks to the log."""


class Child:
    """One process, its connection and what it is at."""

    def __init__(self, setup: bytes, log: Path | None) -> None:
        self.log = log
        self.ready = False
        self.work: Work | None = None
        self.heard = time.monotonic()
        """When it last said something, or was given work."""
        ours, theirs = socket.socketpair()
        _limit_stalls(ours)
        self.connection = Connection(ours.detach())
        with theirs, mark_file() as mark:
            self.mark = Mark(mark.fileno())
            self._popen = _spawn(theirs.fileno(), mark.fileno(), log)
        self.send(pickle.dumps([os.path.abspath(entry) for entry in sys.path]))
        self.send(setup)

    def send(self, message: bytes) -> None:
        """Send a message; a process that has died or does not read is found out later."""
        with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            self.connection.send_bytes(message)
        self.heard = time.monotonic()

    def receive(self) -> Ready | Results | None:
        """Return what has arrived, or ``None`` if the process has gone."""
        with suppress(EOFError, OSError):
            message: Ready | Results = pickle.loads(self.connection.recv_bytes())
            self.heard = time.monotonic()
            return message
        return None

    def exited(self) -> bool:
        """Return whether the process has ended, without reaping it."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._popen.returncode is not None or os.waitid(os.P_PID, self._popen.pid, flags) is not None

    def write_stacks(self) -> None:
        """Let the process write what it is doing to its log, which it can do whatever that is."""
        if self.log is None or self.exited():
            return
        size, ends = self.log.stat().st_size, time.monotonic() + STACKS_S
        os.kill(self._popen.pid, STACKS_SIGNAL)
        while self.log.stat().st_size == size and time.monotonic() < ends:
            time.sleep(0.01)

    def hang_up(self) -> None:
        """Close the connection, at which the process ends by itself."""
        self.connection.close()

    def end(self, grace_s: float) -> str:
        """Wait for the process to end, kill what is left of it and of its children, and say how it ended.

        The process is not reaped before, so its id cannot have passed to somebody else.
        """
        ends = time.monotonic() + grace_s
        while time.monotonic() < ends and not self.exited():
            time.sleep(0.005)
        os.killpg(self._popen.pid, signal.SIGKILL)
        return _describe_exit(self._popen.wait())

    def last_words(self) -> list[Results]:
        """Return what a process that has ended sent before."""
        words = []
        with suppress(OSError):
            while self.connection.poll(0) and (message := self.receive()) is not None:
                words += [message] if isinstance(message, Results) else []
        return words

    def close(self) -> None:
        """Let go of what the process shared with this one."""
        self.mark.close()
        self.connection.close()


def _limit_stalls(ours: socket.socket) -> None:
    """Let a read or write fail when a stopped process blocks it, so that no wait is without an end."""
    limit = struct.pack("@ll", STALL_S, 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _spawn(descriptor: int, mark: int, log: Path | None) -> subprocess.Popen[bytes]:
    # The kernel's death signal follows the thread that starts a process, so only the main thread asks for it.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    arguments = [str(descriptor), str(mark), str(parent)]
    with ExitStack() as stack:
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
        output = stack.enter_context(log.open("ab")) if log else None
        return subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", "anygauge.rollout.rewards.process", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output or sys.stderr.fileno(),
            stderr=output,
            pass_fds=[descriptor, mark],
            start_new_session=True,
        )


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
