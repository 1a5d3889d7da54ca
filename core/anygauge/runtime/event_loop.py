"""Event loop in a thread of its own, for clients that talk to many engines at once."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Set
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, TypeVarTuple

from anygauge_hooks.errors import DeadlineError
from anygauge_hooks.rollout import SESSION

__all__ = ["EventLoop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Idle = tuple[Callable[[], None], Callable[[], Set[str]]]


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

    def when_idle(self, callback: Callable[[], None], waiting: Callable[[], Set[str]]) -> None:
        """Call a function once, as soon as the loop and its threads are idle.

        That is when no callback is ready and no thread is at work for the loop (``asyncio.to_thread``), other
        than for a session that waits for the callback: its thread may be what waits. What waits for a socket
        or a timer may go on later, but nothing that runs in the loop has been overtaken. Called in the loop.

        :param waiting: Returns the sessions (:data:`anygauge_hooks.rollout.SESSION`) that wait for it.
        """
        self._loop.when_idle(callback, waiting)

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

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop's thread and return its result."""

        async def called() -> T:
            return function()

        return self.run(called())


class _IdleLoop(asyncio.SelectorEventLoop):
    """An event loop that says when nothing in it can go on by itself."""

    def __init__(self) -> None:
        super().__init__(_IdleSelector(self._call_idle))
        self._threads: Counter[str | None] = Counter()
        self._when_idle: list[Idle] = []

    def when_idle(self, callback: Callable[[], None], waiting: Callable[[], Set[str]]) -> None:
        self._when_idle.append((callback, waiting))

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        session = SESSION.get()
        self._threads[session] += 1
        future.add_done_callback(lambda _: self._thread_done(session))
        return future

    def _thread_done(self, session: str | None) -> None:
        self._threads[session] -= 1
        if not self._threads[session]:
            del self._threads[session]

    def _call_idle(self) -> bool:
        """Call what waits for this moment, and return whether there was anything."""
        ready = [each for each in self._when_idle if not self._threads or self._threads.keys() <= each[1]()]
        for each in ready:
            self._when_idle.remove(each)
            self.call_soon(each[0])
        return bool(ready)


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
