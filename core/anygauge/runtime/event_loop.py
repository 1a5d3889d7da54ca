"""Event loop in a thread of its own, for clients that talk to many engines at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from anygauge_hooks.errors import DeadlineError

__all__ = ["EventLoop"]

T = TypeVar("T")


class EventLoop:
    """Runs coroutines in a thread of its own, which ends with the ``with`` block; so does what still runs."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)

    def __enter__(self) -> EventLoop:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(
        self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None, what: str = "the answer"
    ) -> T:
        """Return what a coroutine returns.

        :param timeout_s: Longest wait; the coroutine is cancelled then.
        :param what: Is waited for; for the error.
        :raises DeadlineError: It took longer.
        """
        future = self.start(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise  # the coroutine's own
            raise DeadlineError(
                f"Waited for {what}: it was not there within {timeout_s:g} s.",
                hint="Raise run.timeout_s if it may take longer.",
            ) from None
        finally:
            future.cancel()


async def _cancel_all() -> None:
    """Cancel every other task of this loop, and wait until each has seen it."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
