"""Signal handling: a signal ends a run in order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["postpone_first", "terminate_as_exception"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Ending:
    """A handler that raises at the first signal and ignores those that come while that ends the process."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.postpones: Callable[[], bool] | None = None
        """Called at the next signal; a true result keeps it from raising."""
        self._raised: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # One that was lost, as in a finalizer, must not leave a process that nothing ends.
        if self._raised is not None and _is_handled(self._raised):
            return
        self.received.append(number)
        postpones, self.postpones = self.postpones, None
        if postpones is None or not postpones():
            self.end(number)

    def end(self, number: int) -> None:
        """Raise what a signal is turned into."""
        self._raised = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        raise self._raised


def _is_handled(error: BaseException) -> bool:
    """Return whether the code that is running now was reached by an exception, or by one that it led to."""
    handled = sys.exc_info()[1]
    while handled is not None and handled is not error:
        handled = handled.__context__
    return handled is error


@contextmanager
def terminate_as_exception(*, for_good: bool = False) -> Iterator[None]:
    """Turn termination signals into an exception, so that ``with`` blocks clean up.

    The first signal raises: Ctrl-C :class:`KeyboardInterrupt`, the others :class:`SystemExit` with the exit
    code that a shell gives for them. Further ones are ignored, since the shut-down that it starts has
    deadlines of its own. A signal that the process was told to ignore stays ignored. One within another
    shares its signals. In another thread than the main one, where no signal arrives, it does nothing.

    :param for_good: The process ends after the block: what has come once is ignored from then on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    outer = (handler for handler in before.values() if isinstance(handler, _Ending))
    ending = next(outer, None) or _Ending()
    for number in caught:
        signal.signal(number, ending)
    try:
        yield
    except SystemExit:
        if ending.received:  # Ray replaces the code of an exit that it sees
            raise SystemExit(128 + ending.received[0]) from None
        raise
    finally:
        for number in caught:
            is_over = for_good and number in ending.received
            signal.signal(number, signal.SIG_IGN if is_over else before[number])


@contextmanager
def postpone_first(postpones: Callable[[], bool]) -> Iterator[None]:
    """Let the first signal raise at the end of the block, where a function says so; else it raises at once.

    So does a second signal. For blocks within :func:`terminate_as_exception`; elsewhere it changes nothing.

    :param postpones: Called in the signal handler: it must wait for nothing, nor print.
    """
    handlers = map(signal.getsignal, SIGNALS)
    ending = next((handler for handler in handlers if isinstance(handler, _Ending)), None)
    if ending is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = len(ending.received)
    ending.postpones = postpones
    try:
        yield
    finally:
        ending.postpones = None
    if len(ending.received) > before:
        ending.end(ending.received[before])
