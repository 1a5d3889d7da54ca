"""Generator on engines in worker processes, which answer requests in waves."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from anygauge.data.balance import split_evenly
from anygauge.runtime.event_loop import EventLoop
from anygauge.runtime.worker_group import Arguments, WorkerGroup
from anygauge.serving.generation_client import GenerationClient
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation

__all__ = ["EmbeddedGenerator", "embedded_client", "plan_wave"]

Places = Sequence[int]
"""Requests of a batch, by their places in a wave."""
Answer = Callable[[Sequence[Sequence[Sequence[GenerateRequest]]]], Sequence[Sequence[Sequence[Generation]]]]
"""Function from the batches of each worker to their answers."""
WhenIdle = Callable[[Callable[[], None], Callable[[], Set[str]]], None]


class EmbeddedGenerator:
    """A :class:`~anygauge_hooks.rollout.Generator` on engines in worker processes.

    Requests wait until their *wave* is complete: until no rollout can go on without an answer. A wave is
    sorted, divided among the workers, and sent in one message to each. So the rows that an engine works on
    together are a function of the requests alone; the last bits of a matrix product depend on them.

    A wave cannot be cut short: :meth:`abort` ends at once only what is not yet part of one.

    :param answer: Called in a thread, once for each wave.
    :param workers: How many workers there are.
    :param when_idle: :meth:`anygauge.runtime.event_loop.EventLoop.when_idle`, which calls a function once
        nothing in the event loop can go on by itself.
    """

    def __init__(self, answer: Answer, workers: int, when_idle: WhenIdle) -> None:
        self._answer = answer
        self._workers = workers
        self._when_idle = when_idle
        self._waiting: list[_QueuedRequest] = []
        self._wave: asyncio.Task[None] | None = None
        self._is_gathering = False

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate a continuation of the request's tokens.

        :raises AnygaugeError: An engine raised it, for every request of the wave.
        """
        queued = _QueuedRequest(request, asyncio.get_running_loop().create_future())
        self._waiting.append(queued)
        if not self._is_gathering:
            self._gather()
        return await queued.answer

    async def abort(self) -> None:
        """Answer waiting requests with no tokens; a running wave continues."""
        for queued in self._waiting:
            queued.set(Generation((), (), (), "abort"))
        self._waiting.clear()

    def _gather(self) -> None:
        """Let requests gather until the wave is complete, and the one before it has its answers."""
        self._is_gathering = True
        if self._wave is None:
            self._when_idle(self._begin, self._sessions)

    def _sessions(self) -> set[str]:
        """Return the sessions that wait for the wave."""
        requests = (queued.request for queued in self._waiting if not queued.answer.done())
        return {request.session for request in requests if request.session is not None}

    def _begin(self) -> None:
        wave = [queued for queued in self._waiting if not queued.answer.done()]
        self._waiting.clear()
        self._is_gathering = False
        if wave:
            self._wave = asyncio.create_task(self._serve(wave), name="wave of generations")

    async def _serve(self, wave: list[_QueuedRequest]) -> None:
        wave.sort(key=lambda queued: queued.request.order)
        requests = [queued.request for queued in wave]
        plan = plan_wave(requests, self._workers)
        batches = [[[requests[place] for place in batch] for batch in own] for own in plan]
        try:
            answers = await asyncio.to_thread(self._answer, batches)
        except Exception as error:  # noqa: BLE001 - foreign code: a rollout engine; who asked gets the error
            for queued in wave:
                queued.fail(error)
        else:
            places = _flat(_flat(plan))
            answered = dict(zip(places, _flat(_flat(answers)), strict=True))
            for place, queued in enumerate(wave):
                queued.set(answered[place])
        self._wave = None
        if self._is_gathering:
            self._when_idle(self._begin, self._sessions)


@contextmanager
def embedded_client(workers: WorkerGroup) -> Iterator[GenerationClient]:
    """Yield a generation client of the embedded engines."""

    def answer(batches: Sequence[Sequence[Sequence[GenerateRequest]]]) -> Sequence[Any]:
        shares: list[Arguments] = [((own,), _NO_KEYWORDS) for own in batches]
        return workers.call("generate", per_rank=shares)

    with EventLoop() as events:
        generator = EmbeddedGenerator(answer, len(workers.workers), events.when_idle)
        wait = lambda work, what: events.run(work, what=what)  # noqa: E731
        yield GenerationClient(generator, events, wait, overlaps=False)


_NO_KEYWORDS: Mapping[str, Any] = {}


class _QueuedRequest(NamedTuple):
    request: GenerateRequest
    answer: asyncio.Future[Generation]

    def set(self, said: Generation) -> None:
        if not self.answer.done():
            self.answer.set_result(said)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def plan_wave(requests: Sequence[GenerateRequest], workers: int) -> list[list[Places]]:
    """Return the batches of each worker.

    The requests of a batch have the same sampling parameters, and ask for numbers of tokens within a factor
    of 2: all rows of a batch go on until the longest is done. Those that continue the same tokens and media
    of a group stay together, since the engine reads these once.
    """
    alike: defaultdict[Any, dict[Any, list[int]]] = defaultdict(dict)
    kinds: dict[int, Any] = {}  # most requests share one object, which is slow to hash
    for place, request in enumerate(requests):
        kind = kinds.get(id(request.params)) or kinds.setdefault(id(request.params), _kind(request.params))
        prompt = request.group, request.tokens, tuple([medium.key for medium in request.media])
        alike[kind].setdefault(prompt, []).append(place)
    plan: list[list[Places]] = [[] for _ in range(workers)]
    for prompts in alike.values():
        groups = list(prompts.values())
        for own, part in zip(plan, split_evenly(len(groups), workers), strict=True):
            if batch := _flat(groups[part]):
                own.append(batch)
    return plan


def _kind(params: SamplingParams) -> tuple[SamplingParams, int]:
    return replace(params, max_new_tokens=1), params.max_new_tokens.bit_length()


def _flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))
