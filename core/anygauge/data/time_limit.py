"""Interrupt Python code of others, such as a chat template, that runs too long."""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType

__all__ = ["OverrunError", "TimeLimit"]

_POLL_S = 0.5
_ends: dict[int, float] = {}
"""When each thread's block must have ended. Whoever takes an entry out decides what happened."""
_watchdogs: list[threading.Thread] = []
"""The thread that looks after them, once there is one."""


class OverrunError(BaseException):
    """Raised in the block; no :class:`Exception`, so that the code in it does not handle it."""


class TimeLimit:
    """End a block of Python code with :class:`OverrunError` some time after its limit.

    It works in any thread, unlike a signal. A single call of C code is not interrupted.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        _ends[threading.get_ident()] = time.monotonic() + self._limit_s
        _watch()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        overrun = _ends.pop(threading.get_ident(), None) is None
        while overrun and kind is not OverrunError:  # it is on its way, and may not hit what follows
            time.sleep(0.01)


def _watch() -> None:
    if not any(each.is_alive() for each in _watchdogs):  # also in a child of fork, which has no other thread
        _watchdogs[:] = [threading.Thread(target=_interrupt_overdue, name="time limits", daemon=True)]
        _watchdogs[0].start()


def _interrupt_overdue() -> None:
    while True:
        time.sleep(_POLL_S)
        now = time.monotonic()
        for thread, ends in list(_ends.items()):
            if now > ends and _ends.pop(thread, None) is not None:
                _interrupt(thread)


def _interrupt(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OverrunError))
