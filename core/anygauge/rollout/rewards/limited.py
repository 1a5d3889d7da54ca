"""Time limit for reward functions that run in the driver, because no other process can import them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import wraps
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Limited"]

_Work = tuple[
    Callable[..., Any], tuple[Any, ...], dict[str, Any], "SimpleQueue[tuple[Any, BaseException | None]]"
]


class Limited:
    """Calls functions in a daemon thread and gives up after a time.

    Python cannot end a thread: a function that hangs goes on beside the run, which no longer waits for it.
    The process can still end. One that hangs in C code and keeps the interpreter's lock stops all of it.

    :param timeout_s: Longest time of a call, in seconds; may be changed between calls.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._queue: SimpleQueue[_Work] | None = None

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the same signature that calls ``fn`` within the limit.

        A coroutine is awaited in an event loop of the thread, so it works beside the loop of a notebook.
        """

        @wraps(fn, updated=())
        def limited(*args: Any, **keys: Any) -> Any:
            return self._call(fn, args, keys)

        return limited

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], keys: dict[str, Any]) -> Any:
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), name="reward", daemon=True).start()
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._queue.put((fn, args, keys, answer))
        value, error = self._answer(answer)
        if error is not None:
            raise error
        return value

    def _answer(self, answer: SimpleQueue[tuple[Any, BaseException | None]]) -> Any:
        try:
            return answer.get(timeout=self.timeout_s)
        except Empty:
            self._queue = None  # the thread is left to its function; the next call gets another
            why = f"the function did not return in {self.timeout_s:g} s"
            return None, TimeoutError(why)


def _serve(queue: SimpleQueue[_Work]) -> None:
    while True:
        fn, args, keys, answer = queue.get()
        try:
            value = fn(*args, **keys)
            answer.put((asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value, None))
        except Exception as error:  # noqa: BLE001 - foreign code: a reward; the sample gets the reason
            answer.put((None, error))
        except BaseException as error:  # noqa: BLE001 - foreign code: a reward may exit
            answer.put((None, RuntimeError(f"{type(error).__name__}: {error}")))


async def _awaited(value: Any) -> Any:
    return await value
