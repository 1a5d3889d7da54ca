"""Child process that runs a module of this project, at the other end of a socket pair."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen

from anygauge.failures import on_failure

__all__ = ["ChildProcess"]

STALL_S = 60
"""Longest pause in the middle of a message, in whole seconds."""


class ChildProcess:
    """A process that leads its own session, and the connection to it.

    :param module: Runs as ``python -m MODULE DESCRIPTOR ARGUMENTS``, with the descriptor of its socket.
    :param output: Descriptor that standard output and standard error go to.
    :param pass_fds: Further descriptors that it inherits.
    :param env: Added to this process's environment.
    :param hidden: Variables of this process's environment that it does not get.
    :param stdin: As of :class:`subprocess.Popen`.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        output: int,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        hidden: Collection[str] = (),
        stdin: int = DEVNULL,
    ) -> None:
        ours, theirs = socket.socketpair()
        _limit_stalls(ours)
        self.connection = Connection(ours.detach())
        with on_failure(self.connection.close), theirs:
            self.popen = Popen(
                [sys.executable, "-u", "-P", "-m", module, str(theirs.fileno()), *arguments],
                stdin=stdin,
                stdout=output,
                stderr=output,
                env={name: os.environ[name] for name in os.environ if name not in hidden} | dict(env or {}),
                pass_fds=[theirs.fileno(), *pass_fds],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.popen.pid

    def exited(self) -> bool:
        """Return whether the process has ended, without reaping it."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.popen.returncode is not None or os.waitid(os.P_PID, self.pid, flags) is not None

    def wait_exit(self, timeout_s: float) -> bool:
        """Return whether the process ends in time."""
        deadline = time.monotonic() + timeout_s
        while not self.exited():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if not self.exited():
            os.kill(self.pid, number)

    def reap(self) -> str:
        """Kill the process and its children, and return how it ended.

        The process is not reaped before, so its id cannot have passed to somebody else.
        """
        if self.popen.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
        return _describe_exit(self.popen.wait())


def _limit_stalls(ours: socket.socket) -> None:
    """Let a read or write fail when a stopped process blocks it, so that no wait is without an end."""
    limit = struct.pack("@ll", STALL_S, 0)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
