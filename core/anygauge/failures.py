"""Cleanup after a failure, the errors of background threads, and the places of errors in foreign code."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import dropwhile
from pathlib import Path
from typing import TypeVar

__all__ = ["in_background", "on_failure", "raised_at"]

T = TypeVar("T")


class on_failure(AbstractContextManager[None]):
    """Call a function if the block raises, whatever it raises: a KeyboardInterrupt, too."""

    def __init__(self, cleanup: Callable[[], object]) -> None:
        self._cleanup = cleanup

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._cleanup()


def in_background(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a daemon thread, because it may block forever.

    :param name: Name of the thread, as stacks show it.
    :returns: Future with the result or the error of the function.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - foreign code: transports, engines; result() raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def raised_at(error: BaseException, *callers: str) -> str:
    """Return where a function of somebody else raised, to end a clause with; empty if only libraries did.

    :param callers: Files of the frames that called it, beside that of the first frame.
    """
    whole = traceback.extract_tb(error.__traceback__)
    frames = list(dropwhile(lambda frame: frame.filename in (whole[0].filename, *callers), whole))
    # What the user wrote, and not the library that it called.
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    if not own:
        return ""
    line = f", `{own[-1].line:.80}`" if own[-1].line else ""  # the file of a notebook's cell is only a number
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}{line}"
