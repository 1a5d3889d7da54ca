"""Signals that end a run in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["terminate_as_exception"]

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def terminate_as_exception() -> Iterator[None]:
    """Turn a request to end into :class:`SystemExit`, so that ``with`` blocks end what they started.

    The first signal raises, with the exit code that a shell gives for it; further ones are ignored, since the
    shut-down that it starts has deadlines of its own. A signal that the process was told to ignore stays
    ignored. Call it from the main thread.
    """
    received: list[int] = []

    def raise_exit(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for number in caught:
        signal.signal(number, raise_exit)
    try:
        yield
    except SystemExit:
        if received:  # Ray replaces the code of an exit that it sees
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number in caught:
            signal.signal(number, before[number])
