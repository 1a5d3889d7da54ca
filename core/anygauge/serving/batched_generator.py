"""Adapter from a batch rollout engine to a generator of single requests."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.generation_client import GenerationClient
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation

__all__ = ["BatchedGenerator", "Generate", "batched_generation_client"]

Generate = Callable[[Sequence[Prompt], SamplingParams, Sequence[Sequence[int]]], list[list[Sample]]]
"""Function from prompts, with one seed per sample, to samples in order."""

QUIET_PASSES = 3
"""Passes of the event loop without a new request after which a batch is complete: a coroutine that was
answered asks again, or starts another that does, within fewer."""


class BatchedGenerator:
    """A :class:`~anygauge_hooks.rollout.Generator` on engines that have no server.

    Requests are collected until every coroutine waits; then one call answers all of them. A call cannot be
    cut short, so that :meth:`abort` ends at once only what is not yet part of one.

    :param generate: Called in a thread, one call at a time.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._waiting: list[_QueuedRequest] = []
        self._serving: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return what follows.

        :raises AnygaugeError: What the engines raise, for every request of the call.
        """
        queued = _QueuedRequest(request, asyncio.get_running_loop().create_future())
        self._waiting.append(queued)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="batched generation")
        return await queued.answer

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Yield what follows as one part."""
        yield await self.generate(request)

    async def abort(self) -> None:
        """Answer what is not yet part of a call with no tokens; the call that is under way goes on."""
        for queued in self._waiting:
            _answer(queued, Generation((), (), (), "abort"))
        self._waiting.clear()

    async def _serve(self) -> None:
        while self._waiting:
            await self._quiet()
            batch, self._waiting = self._waiting, []
            for call in _calls([queued for queued in batch if not queued.answer.done()]):
                await self._make(call)

    async def _quiet(self) -> None:
        """Return once no coroutine is about to ask."""
        seen, passes = len(self._waiting), 0
        while passes < QUIET_PASSES:
            await asyncio.sleep(0)
            passes = passes + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)

    async def _make(self, call: _Call) -> None:
        try:
            samples = await asyncio.to_thread(self._generate, call.prompts, call.params, call.seeds)
        except Exception as error:  # noqa: BLE001 - foreign code: a rollout engine; who asked gets the error
            for queued in call.requests():
                if not queued.answer.done():
                    queued.answer.set_exception(error)
            return
        for group, own in zip(call.groups, samples, strict=True):
            for queued, sample in zip(group, own, strict=True):
                _answer(queued, _generation(sample, queued.request.params.max_new_tokens))


@contextmanager
def batched_generation_client(generate: Generate) -> Iterator[GenerationClient]:
    """Yield how requests get, one by one, to engines that answer a batch at a time."""
    with EventLoop() as events:
        generator = BatchedGenerator(generate)
        yield GenerationClient(generator, events, lambda work, what: events.run(work, what=what))


class _QueuedRequest(NamedTuple):
    request: GenerateRequest
    answer: asyncio.Future[Generation]


class _Call(NamedTuple):
    """One call of the engines."""

    params: SamplingParams
    groups: Sequence[Sequence[_QueuedRequest]]
    """Requests by group; those of a group continue the same tokens and media."""

    @property
    def prompts(self) -> list[Prompt]:
        return [
            Prompt(index=index, tokens=first.tokens, text="", media=first.media)
            for index, first in enumerate(group[0].request for group in self.groups)
        ]

    @property
    def seeds(self) -> list[list[int]]:
        return [[queued.request.seed for queued in group] for group in self.groups]

    def requests(self) -> list[_QueuedRequest]:
        return [queued for group in self.groups for queued in group]


def _calls(batch: Sequence[_QueuedRequest]) -> list[_Call]:
    """Divide requests among calls, of which each has one set of sampling parameters.

    Those of one call may ask for different numbers of tokens, up to a factor of 2; the longest is generated
    for all, and what is too much is cut off.
    """
    by_params: defaultdict[tuple[SamplingParams, int], list[_QueuedRequest]] = defaultdict(list)
    for queued in batch:
        params = queued.request.params
        by_params[replace(params, max_new_tokens=1), params.max_new_tokens.bit_length()].append(queued)
    return [_call(some) for some in by_params.values()]


def _call(batch: Sequence[_QueuedRequest]) -> _Call:
    longest = max(queued.request.params.max_new_tokens for queued in batch)
    groups: defaultdict[tuple[tuple[int, ...], tuple[str, ...]], list[_QueuedRequest]] = defaultdict(list)
    for queued in batch:
        keys = tuple(medium.key for medium in queued.request.media)
        groups[queued.request.tokens, keys].append(queued)
    return _Call(replace(batch[0].request.params, max_new_tokens=longest), list(groups.values()))


def _answer(queued: _QueuedRequest, said: Generation) -> None:
    if not queued.answer.done():
        queued.answer.set_result(said)


def _generation(sample: Sample, limit: int) -> Generation:
    cut = len(sample.response_tokens) > limit
    return Generation(
        tokens=sample.response_tokens[:limit],
        log_probs=sample.log_probs[:limit],
        weight_versions=sample.weight_versions[:limit],
        finish_reason="length" if cut else sample.finish_reason,
    )
