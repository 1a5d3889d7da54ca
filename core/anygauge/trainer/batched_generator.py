"""Engines that answer a batch at a time, as ones that answer each request by itself."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from anygauge.trainer.event_loop import EventLoop
from anygauge.trainer.requests import Requests
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation

__all__ = ["BatchedGenerator", "Generate", "batched_requests"]

Generate = Callable[[Sequence[Prompt], SamplingParams, Sequence[Sequence[int]]], list[list[Sample]]]
"""From prompts, and for each one seed per sample, to the samples in order."""

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
        self._waiting: list[_Asked] = []
        self._serving: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return what follows.

        :raises AnygaugeError: What the engines raise, for every request of the call.
        """
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="batched generation")
        return await asked.answer

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Yield what follows as one part."""
        yield await self.generate(request)

    async def abort(self) -> None:
        """Answer what is not yet part of a call with no tokens; the call that is under way goes on."""
        for asked in self._waiting:
            _answer(asked, Generation((), (), (), "abort"))
        self._waiting.clear()

    async def _serve(self) -> None:
        while self._waiting:
            await self._quiet()
            batch, self._waiting = self._waiting, []
            for call in _calls([asked for asked in batch if not asked.answer.done()]):
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
        except Exception as error:  # noqa: BLE001 - it goes to those who asked
            for asked in call.asked():
                if not asked.answer.done():
                    asked.answer.set_exception(error)
            return
        for group, own in zip(call.groups, samples, strict=True):
            for asked, sample in zip(group, own, strict=True):
                _answer(asked, _generation(sample, asked.request.params.max_new_tokens))


@contextmanager
def batched_requests(generate: Generate) -> Iterator[Requests]:
    """Yield how requests get, one by one, to engines that answer a batch at a time."""
    with EventLoop() as events:
        generator = BatchedGenerator(generate)
        yield Requests(generator, events, lambda work, what: events.run(work, what=what))


class _Asked(NamedTuple):
    request: GenerateRequest
    answer: asyncio.Future[Generation]


class _Call(NamedTuple):
    """One call of the engines."""

    params: SamplingParams
    groups: Sequence[Sequence[_Asked]]
    """Those of a group go on from the same tokens and media."""

    @property
    def prompts(self) -> list[Prompt]:
        return [
            Prompt(index=index, tokens=first.tokens, text="", media=first.media)
            for index, first in enumerate(group[0].request for group in self.groups)
        ]

    @property
    def seeds(self) -> list[list[int]]:
        return [[asked.request.seed for asked in group] for group in self.groups]

    def asked(self) -> list[_Asked]:
        return [asked for group in self.groups for asked in group]


def _calls(batch: Sequence[_Asked]) -> list[_Call]:
    """Divide requests among calls, of which each has one set of sampling parameters.

    Those of one call may ask for different numbers of tokens, up to a factor of 2; the longest is generated
    for all, and what is too much is cut off.
    """
    by_params: defaultdict[tuple[SamplingParams, int], list[_Asked]] = defaultdict(list)
    for asked in batch:
        params = asked.request.params
        by_params[replace(params, max_new_tokens=1), params.max_new_tokens.bit_length()].append(asked)
    return [_call(some) for some in by_params.values()]


def _call(batch: Sequence[_Asked]) -> _Call:
    longest = max(asked.request.params.max_new_tokens for asked in batch)
    groups: defaultdict[tuple[tuple[int, ...], tuple[str, ...]], list[_Asked]] = defaultdict(list)
    for asked in batch:
        keys = tuple(medium.key for medium in asked.request.media)
        groups[asked.request.tokens, keys].append(asked)
    return _Call(replace(batch[0].request.params, max_new_tokens=longest), list(groups.values()))


def _answer(asked: _Asked, said: Generation) -> None:
    if not asked.answer.done():
        asked.answer.set_result(said)


def _generation(sample: Sample, limit: int) -> Generation:
    cut = len(sample.response_tokens) > limit
    return Generation(
        tokens=sample.response_tokens[:limit],
        log_probs=sample.log_probs[:limit],
        weight_versions=sample.weight_versions[:limit],
        finish_reason="length" if cut else sample.finish_reason,
    )
