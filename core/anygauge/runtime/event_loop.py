"""Event loop in a thread of its own, for clients that talk to many engines at once."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, TypeVarTuple

from anygauge_hooks.errors import DeadlineError

__all__ = ["EventLoop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class EventLoop:
    """Runs coroutines in its own thread until the ``with`` block ends, which ends them too."""

    def __init__(self) -> None:
        self._loop = _IdleLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)

    def __enter__(self) -> EventLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call a function once, as soon as the loop and its threads are idle.

        That is when no callback is ready and no thread is at work for the loop (``asyncio.to_thread``). What
        waits for a socket or a timer may go on later, but nothing that runs in the loop has been overtaken.
        Called in the loop.
        """
        self._loop.when_idle(callback)

    def run(
        self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None, what: str = "the answer"
    ) -> T:
        """Run a coroutine and return its result.

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


class _IdleLoop(asyncio.SelectorEventLoop):
    """An event loop that says when nothing in it can go on by itself."""

    def __init__(self) -> None:
        super().__init__(_IdleSelector(self._call_idle))
        self._threads = 0
        self._when_idle: list[Callable[[], None]] = []

    def when_idle(self, callback: Callable[[], None]) -> None:
        self._when_idle.append(callback)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._threads -= 1

    def _call_idle(self) -> bool:
        """Call what waits for this moment, and return whether there was anything."""
        if self._threads or not self._when_idle:
            return False
        callbacks, self._when_idle = self._when_idle, []
        for callback in callbacks:
            self.call_soon(callback)
        return True


class _IdleSelector(selectors.DefaultSelector):
    """Selector that is asked to wait when the loop has nothing to run, and says so first.

    :param is_news: Called then; returns whether it gave the loop something to run.
    """

    def __init__(self, is_news: Callable[[], bool]) -> None:
        super().__init__()
        self._is_news = is_news

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0 or self._is_news():
            return ready
        return super().select(timeout)


async def _cancel_all() -> None:
    """Cancel every other task of this loop, and wait until each has seen it."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
