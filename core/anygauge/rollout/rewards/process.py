"""Scoring process: ``python -m anygauge.rollout.rewards.process SOCKET MARK LOG``.

It runs what may raise, hang, crash or eat memory, as the child of a :mod:`~anygauge.distributed.guard`.
That leads a session, so that Ctrl-C on the terminal reaches the driver alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from anygauge.distributed.guard import Log, fork_guarded
from anygauge.observability.control_characters import format_exception
from anygauge.plugins import imported
from anygauge.rollout.rewards.call import Call, Item, Outcome, failure
from anygauge.rollout.rewards.mark import Mark
from anygauge.rollout.rewards.messages import (
    STACKS_SIGNAL,
    UNHEARD,
    Chunk,
    Ready,
    Results,
    Setup,
    encode_reply,
)
from anygauge.rollout.rewards.resolve import Origin, is_async

__all__ = ["main"]

_FLUSH_NS = 10_000_000
"""Results are sent together; none waits longer than this, or than the call after it."""
_MAX_TRACEBACKS = 20
"""In the log of one process."""


class Server:
    """Scores chunks, one after the other."""

    def __init__(self, setup: Setup, mark: Mark, send: Callable[[Results], None]) -> None:
        self._setup = setup
        self._mark = mark
        self._send = send
        self._calls = [Call(fn=_function(spec.origin), **spec.fields) for spec in setup.calls]
        self._loop = asyncio.new_event_loop()
        self._done: list[tuple[int, Sequence[Outcome]]] = []
        self._seen: set[str] = set()
        self.spent = False

    def score(self, chunk: Chunk) -> None:
        """Score every item of a chunk and send the outcomes."""
        call, items = self._calls[chunk.call], chunk.items()
        if is_async(call.fn):
            self._loop.run_until_complete(self._score_together(call, items))
        else:
            self._score_one_by_one(call, items)
        self._flush()
        if self.spent:
            self._send(Results((), spent=True))

    def _score_one_by_one(self, call: Call, items: Sequence[Item]) -> None:
        flushed = time.monotonic_ns()
        for index, item in enumerate(items):
            self._mark.begin(index)
            try:
                outcomes = call.outcomes(self._returned(call.fn(**call.arguments(item))), item)
            except BaseException as error:  # noqa: BLE001 - foreign code: a reward
                outcomes = self._failed(call, item, error)
            self._mark.end()
            self._done.append((index, outcomes))
            if self.spent:
                return
            if time.monotonic_ns() - flushed > _FLUSH_NS:
                self._flush()
                flushed = time.monotonic_ns()

    def _returned(self, value: Any) -> Any:
        """Return a result, awaited where a plain function hands on a coroutine."""
        return self._loop.run_until_complete(value) if inspect.iscoroutine(value) else value

    async def _score_together(self, call: Call, items: Sequence[Item]) -> None:
        gate = asyncio.Semaphore(self._setup.concurrency)

        async def score(index: int, item: Item) -> None:
            async with gate:
                outcomes = await self._awaited(call, index, item)
            if not self._done:
                self._loop.call_soon(self._flush)
            self._done.append((index, outcomes))
            if self.spent:
                raise MemoryError

        # Calls that were under way when one ran out of memory are left without an outcome, to be made again.
        with contextlib.suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                for index, item in enumerate(items):
                    tasks.create_task(score(index, item))

    async def _awaited(self, call: Call, index: int, item: Item) -> list[Outcome]:
        try:
            async with asyncio.timeout(self._setup.timeout_s) as limit:
                value = await _Marked(call.fn(**call.arguments(item)), self._mark, index)
            return call.outcomes(value, item)
        except BaseException as error:  # foreign code: a reward
            if limit.expired():
                why = f"did not return in {self._setup.timeout_s:g} s"
                return [call.failed(why)] * call.size(item)
            if self.spent:
                raise
            return self._failed(call, item, error)

    def _failed(self, call: Call, item: Item, error: BaseException) -> list[Outcome]:
        self.spent |= isinstance(error, MemoryError)
        why = failure(error)
        if isinstance(error, MemoryError):
            why += f": it has {self._setup.memory_bytes / 2**30:g} GiB (reward.memory_gib)"
        if why not in self._seen and len(self._seen) < _MAX_TRACEBACKS:
            self._seen.add(why)
            _print(error)
        return [call.failed(why)] * call.size(item)

    def _flush(self) -> None:
        if self._done:
            self._send(Results(self._done))
            self._done = []


class _Marked:
    """An awaitable that marks its item whenever its coroutine runs, and not while it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], mark: Mark, index: int) -> None:
        self._coroutine = coroutine
        self._mark = mark
        self._index = index

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self._coroutine.send
        argument: Any = None
        while True:
            self._mark.begin(self._index)
            try:
                awaited = resume(argument)
            except StopIteration as end:
                return end.value
            finally:
                self._mark.end()
            try:
                argument, resume = (yield awaited), self._coroutine.send
            except BaseException as error:  # noqa: BLE001 - foreign code: handed on to a reward's coroutine
                argument, resume = error, self._coroutine.throw


def _print(error: BaseException) -> None:
    """Write a traceback to the log, unless a function has closed the way there."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(format_exception(error))


def _function(origin: Origin) -> Any:
    if origin.kind == "path":
        return imported(origin.value, "Reward function")
    if origin.kind == "pickle":
        return pickle.loads(origin.value)
    from anygauge.plugins import load_plugins

    return load_plugins().get("register_reward_functions", origin.value).fn


def main(socket: int, mark: int, log: int) -> None:
    """Serve the driver until it closes the connection.

    :param socket: Descriptor of the socket that leads to the driver.
    :param mark: Descriptor of the file of the process's :class:`Mark`.
    :param log: Whether standard output is a log.
    """
    outputs = [((1, 2), Log(1))] if log else []
    fork_guarded([socket, mark], outputs, handed_on=(STACKS_SIGNAL, signal.SIGCONT))
    for descriptor in (socket, mark):
        os.set_inheritable(descriptor, False)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    connection = Connection(socket)
    sys.path[:] = pickle.loads(connection.recv_bytes())
    setup: Setup = pickle.loads(connection.recv_bytes())
    _limit(setup.memory_bytes)
    inbox: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()

    def send(message: Ready | Results) -> None:
        data = memoryview(encode_reply(message))
        try:
            while data:
                data = data[os.write(socket, data) :]
        except (BrokenPipeError, ConnectionResetError):
            return  # the driver has given this work up
        except OSError:
            os._exit(UNHEARD)

    try:
        server = Server(setup, Mark(mark), send)
    except BaseException as error:  # noqa: BLE001 - foreign code: rewards are imported; the driver raises it
        _print(error)
        send(Ready(f"{type(error).__name__}: {error}"))
        return
    send(Ready())
    while not server.spent and (message := inbox.get()) is not None:
        server.score(pickle.loads(message))


def _limit(memory_bytes: int) -> None:
    # Not the address space: libraries reserve far more of it than they ever use.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or memory_bytes < most:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _receive(connection: Connection, inbox: SimpleQueue[bytes | None]) -> None:
    """Queue what arrives, and ``None`` at the end."""
    with contextlib.suppress(EOFError, OSError, MemoryError):
        while True:
            inbox.put(connection.recv_bytes())
    inbox.put(None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
