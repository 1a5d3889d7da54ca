"""Signals that end a run in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["terminate_as_exception"]

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def terminate_as_exception() -> Iterator[None]:
    """Turn a request to end into :class:`SystemExit`, so that ``with`` blocks end what they started.

    The first signal raises, with the exit code that a shell gives for it; further ones are ignored, since the
    shut-down that it starts has deadlines of its own. A signal that the process was told to ignore stays
    ignored. Call it from the main thread.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number, handler in handlers.items() if handler is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, _raise_exit)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, handlers[number])


def _raise_exit(number: int, frame: FrameType | None) -> NoReturn:
    for other in SIGNALS:
        if signal.getsignal(other) is _raise_exit:
            signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)
