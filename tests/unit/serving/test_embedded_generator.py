"""Many coroutines, and waves of requests for the engines in workers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.embedded_generator import EmbeddedGenerator, plan_wave
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import SESSION, GenerateRequest, Generation

T = TypeVar("T")
Batches = Sequence[Sequence[Sequence[GenerateRequest]]]


class Engines:
    """Says the seed of a request as often as it was asked for tokens."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.waves: list[Batches] = []
        self.error: Exception | None = None
        self.entered, self.leave = threading.Event(), threading.Event()
        self.leave.set()

    def answer(self, batches: Batches) -> list[list[list[Generation]]]:
        self.waves.append(batches)
        self.entered.set()
        assert self.leave.wait(20)
        if self.error is not None:
            raise self.error
        return [[[_said(each) for each in batch] for batch in own] for own in batches]

    def seeds(self) -> list[list[list[list[int]]]]:
        """Return the seeds of each wave, by worker and batch."""
        return [[[[each.seed for each in batch] for batch in own] for own in wave] for wave in self.waves]

    def run(self, work: Callable[[EmbeddedGenerator], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine returns that is given a generator on these engines."""
        with EventLoop() as events:
            generator = EmbeddedGenerator(self.answer, self.workers, events.when_idle)
            return events.run(work(generator), timeout_s=20)


async def entered(engines: Engines) -> None:
    """Wait until a wave has begun, in a way that no wave waits for."""
    while not engines.entered.is_set():
        await asyncio.sleep(0.001)


def _said(request: GenerateRequest) -> Generation:
    length = request.params.max_new_tokens
    return Generation((request.seed,) * length, (-1.0,) * length, (3,) * length, "length")


PARAMS = SamplingParams(max_new_tokens=2)


def request(group: int, rollout: int, call: int = 0, **changes: Any) -> GenerateRequest:
    order = group, rollout, call
    made = GenerateRequest(
        "-".join(map(str, order)),
        (5, group),
        PARAMS,
        seed=100 * group + 10 * rollout + call,
        group=str(group),
        order=order,
    )
    return made._replace(**changes)


def test_a_wave_is_sorted_by_group_and_rollout_whatever_the_order_of_its_requests() -> None:
    """The rows of a product differ in their last bits with the rows beside them."""
    asked = [request(group, rollout) for group in (2, 10, 11) for rollout in range(2)]
    for number in range(4):
        engines = Engines(workers=2)
        shuffled = random.Random(number).sample(asked, len(asked))

        async def ask(
            generator: EmbeddedGenerator, asked: Sequence[GenerateRequest] = shuffled
        ) -> list[Generation]:
            return await asyncio.gather(*map(generator.generate, asked))

        answers = engines.run(ask)
        assert [answer.tokens[0] for answer in answers] == [each.seed for each in shuffled]
        assert engines.seeds() == [[[[200, 210]], [[1000, 1010, 1100, 1110]]]]


def test_a_wave_waits_for_every_rollout_that_can_go_on() -> None:
    """However many passes of the event loop, and however long in threads, one takes between two requests."""
    engines = Engines()
    tool = threading.Event()

    async def rollout(generator: EmbeddedGenerator, number: int) -> None:
        await generator.generate(request(number, 0, 0))
        if number == 0:
            for _ in range(50):
                await asyncio.sleep(0)
        elif number == 1:
            await asyncio.to_thread(tool.wait, 20)
        await generator.generate(request(number, 0, 1))

    async def ask(generator: EmbeddedGenerator) -> None:
        timer = threading.Timer(0.05, tool.set)
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(rollout(generator, number))
            timer.start()

    engines.run(ask)
    assert engines.seeds() == [[[[0, 100, 200, 300]]], [[[1, 101, 201, 301]]]]


def test_a_wave_does_not_wait_for_a_thread_that_waits_for_it() -> None:
    """As a blocking client of the gateway does."""
    engines = Engines()

    async def rollout(generator: EmbeddedGenerator, number: int) -> None:
        SESSION.set(f"session {number}")
        loop, asked = asyncio.get_running_loop(), request(number, 0, session=f"session {number}")
        if number == 2:
            await asyncio.to_thread(time.sleep, 0.05)
            await generator.generate(asked)
            return

        def blocking_client() -> Generation:
            return asyncio.run_coroutine_threadsafe(generator.generate(asked), loop).result(20)

        await asyncio.to_thread(blocking_client)

    async def ask(generator: EmbeddedGenerator) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(rollout(generator, number))

    engines.run(ask)
    assert engines.seeds() == [[[[0, 100, 200]]]]


def test_a_wave_does_not_wait_for_a_rollout_that_waits_for_another() -> None:
    engines = Engines()

    async def ask(generator: EmbeddedGenerator) -> None:
        spoken = asyncio.Event()

        async def first() -> None:
            await generator.generate(request(0, 0))
            spoken.set()

        async def second() -> None:
            await spoken.wait()
            await generator.generate(request(1, 0))

        await asyncio.gather(second(), first())

    engines.run(ask)
    assert engines.seeds() == [[[[0]]], [[[100]]]]


def test_samples_of_a_prompt_go_to_one_worker_and_groups_are_divided_evenly() -> None:
    wave = [request(group, rollout) for group in range(5) for rollout in range(2)]
    assert plan_wave(wave, 2) == [[[0, 1, 2, 3]], [[4, 5, 6, 7, 8, 9]]]
    assert plan_wave(wave[:2], 2) == [[], [[0, 1]]]


def test_equal_tokens_of_different_images_are_prompts_of_their_own() -> None:
    images = [(Media("image", key, ((0, 1),), (1, 2, 2)),) for key in "aba"]
    wave = [request(0, n, tokens=(1, 2), media=media) for n, media in enumerate(images)]
    assert plan_wave(wave, 1) == [[[0, 2, 1]]]


def test_lengths_share_a_batch_within_a_factor_of_two() -> None:
    params = [SamplingParams(max_new_tokens=n) for n in (1, 4, 5, 7, 12)]
    params.append(SamplingParams(max_new_tokens=5, temperature=0.5))
    wave = [request(0, n, params=each) for n, each in enumerate(params)]
    assert plan_wave(wave, 1) == [[[0], [1, 2, 3], [4], [5]]]


def test_what_comes_meanwhile_is_the_next_wave() -> None:
    engines = Engines()
    engines.leave.clear()

    async def ask(generator: EmbeddedGenerator) -> None:
        first = asyncio.create_task(generator.generate(request(1, 0)))
        await entered(engines)
        rest = [asyncio.create_task(generator.generate(request(n, 0))) for n in (2, 3)]
        await asyncio.sleep(0)
        rest[0].cancel()
        engines.leave.set()
        await first
        assert (await rest[1]).tokens == (300, 300)

    engines.run(ask)
    assert engines.seeds() == [[[[100]]], [[[300]]]]


def test_an_abort_answers_what_is_in_no_wave() -> None:
    engines = Engines()
    engines.leave.clear()

    async def ask(generator: EmbeddedGenerator) -> list[Generation]:
        first = asyncio.create_task(generator.generate(request(1, 0)))
        await entered(engines)
        second = asyncio.create_task(generator.generate(request(2, 0)))
        await asyncio.sleep(0)
        await generator.abort()
        aborted = await second
        engines.leave.set()
        return [await first, aborted]

    first, second = engines.run(ask)
    assert (first.tokens, second) == ((100, 100), Generation((), (), (), "abort"))


def test_an_error_reaches_everyone_who_asked_and_no_one_after() -> None:
    engines = Engines()
    engines.error = RolloutError("the engines are closed")

    async def ask(generator: EmbeddedGenerator) -> None:
        asked = [asyncio.create_task(generator.generate(request(n, 0))) for n in range(3)]
        for task in asked:
            with pytest.raises(RolloutError, match="closed"):
                await task
        engines.error = None
        assert (await generator.generate(request(9, 0))).tokens == (900, 900)

    engines.run(ask)
