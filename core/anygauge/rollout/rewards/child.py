"""Handle of one scoring process, in the driver."""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anygauge.distributed.child_process import ChildProcess
from anygauge.distributed.guard import KEPT_BYTES
from anygauge.rollout.rewards.mark import Mark, mark_file
from anygauge.rollout.rewards.messages import (
    LONGEST_REPLY,
    STACKS_MARK,
    STACKS_SIGNAL,
    UNHEARD,
    Ready,
    Results,
    decode_reply,
)
from anygauge.rollout.rewards.pending_chunk import PendingChunk

__all__ = ["Child"]

STACKS_S = 3.0
"""For a process that hangs to write its stacks to the log."""
QUIET_S = 0.2
"""Without a new line, after which the stacks are taken to be whole."""
READ_BYTES = 1 << 20
"""Bytes read at a time from a process."""
GUARD_S = 5.0
"""For a guard to end everything."""
_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE
)
"""Names of variables whose values are secrets, such as ``WANDB_API_KEY``."""


def hidden_variables(pass_env: Collection[str]) -> list[str]:
    """Return the variables of the environment that a reward process does not get.

    :param pass_env: Names that it gets although their values are secrets.
    """
    return [name for name in os.environ if _SECRET.search(name) and name not in pass_env]


class Child:
    """One process, its connection and its current item."""

    def __init__(self, setup: bytes, log: Path | None, pass_env: Collection[str]) -> None:
        self.log = log
        self.ready = False
        self.work: PendingChunk | None = None
        self.heard = time.monotonic()
        """When it last said something, or was given work."""
        self._partial = bytearray()
        """The beginning of a message that has not arrived whole."""
        with mark_file() as mark, _output(log) as output:
            self.mark = Mark(mark.fileno())
            self._process = ChildProcess(
                "anygauge.rollout.rewards.process",
                [str(mark.fileno()), str(int(log is not None))],
                output=output,
                pass_fds=[mark.fileno()],
                hidden=hidden_variables(pass_env),
                stdin=subprocess.PIPE,
            )
        self.connection = self._process.connection
        self.send(pickle.dumps([os.path.abspath(entry) for entry in sys.path]))
        self.send(setup)

    def send(self, message: bytes) -> None:
        """Send a message; a process that has died or does not read is found out later."""
        with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            self.connection.send_bytes(message)
        self.heard = time.monotonic()

    def receive(self) -> list[Ready | Results] | None:
        """Return the messages that have arrived whole, or ``None`` if the process has gone.

        It never waits where there is something to read, so half a message holds nobody up.

        :raises ValueError: Something else than a message has arrived.
        """
        try:
            data = os.read(self.connection.fileno(), READ_BYTES)
        except OSError:
            return None
        if not data:
            return None
        lines = self._whole_lines(data)
        if lines:
            self.heard = time.monotonic()
        return [decode_reply(line) for line in lines]

    def _whole_lines(self, data: bytes) -> list[bytes]:
        first, *others = data.split(b"\n")
        self._partial += first
        if len(self._partial) > LONGEST_REPLY:
            raise ValueError(f"more than {LONGEST_REPLY} bytes")
        if not others:
            return []
        lines = [bytes(self._partial), *others[:-1]]
        self._partial = bytearray(others[-1])
        return lines

    def marked(self) -> tuple[int, int] | None:
        """Return which item the process says it is at, and since when (monotonic, in ns), if it has it."""
        mark = self.mark.read()
        return mark if mark and self.work and 0 <= mark[0] < len(self.work.items) else None

    def exited(self) -> bool:
        """Return whether the process has ended."""
        return self._process.exited()

    def write_stacks(self) -> bool:
        """Let the process write what it is doing to its log, and return whether it is there.

        A process can do that whatever it is at, but one that was stopped must be woken first.
        """
        if self.log is None or self.exited():
            return False
        with suppress(OSError):  # the log may be gone
            before = size = self.log.stat().st_size
            for number in (signal.SIGCONT, STACKS_SIGNAL):
                self._process.signal(number)
            grown, ends = math.inf, time.monotonic() + STACKS_S
            while time.monotonic() < min(grown + QUIET_S, ends):
                time.sleep(0.01)
                if self.log.stat().st_size != size:
                    size, grown = self.log.stat().st_size, time.monotonic()
            return STACKS_MARK in _end_of(self.log, before)
        return False

    def hang_up(self) -> None:
        """Close the connection, which ends the process."""
        self.connection.close()

    def end(self, grace_s: float) -> str:
        """Wait for the process to end, let its guard clean up, and return how it ended."""
        self._process.wait_exit(grace_s)
        lifeline = self._process.popen.stdin
        assert lifeline is not None
        lifeline.close()
        self._process.wait_exit(GUARD_S)
        how = self._process.reap()
        is_unheard = self._process.popen.returncode == UNHEARD
        return "ended, since its connection to the driver was closed in it" if is_unheard else how

    def last_words(self) -> list[Results]:
        """Return the last messages of a process that has ended."""
        words: list[Results] = []
        with suppress(OSError, ValueError):
            while self.connection.poll(0) and (messages := self.receive()) is not None:
                words += [message for message in messages if isinstance(message, Results)]
        return words

    def close(self) -> None:
        """Release memory shared with the process."""
        self.mark.close()
        self.connection.close()


def _end_of(log: Path, start: int) -> bytes:
    """Return what a log has behind a position, or its last part if it was shortened meanwhile."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - KEPT_BYTES))
        return file.read()


@contextmanager
def _output(log: Path | None) -> Iterator[int]:
    if log is None:
        yield sys.stderr.fileno()
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a+b") as file:
        yield file.fileno()
