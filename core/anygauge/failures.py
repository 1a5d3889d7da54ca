"""Cleanup after a failure, and the errors of background threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

__all__ = ["in_background", "on_failure"]

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
