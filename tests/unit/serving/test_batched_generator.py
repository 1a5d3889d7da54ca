"""Many coroutines, few calls of engines that answer batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from anygauge.serving.batched_generator import BatchedGenerator
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation


class Engines:
    """Says the seed of a sample as often as it was asked for tokens, up to ten times."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[tuple[int, ...]], SamplingParams, list[list[int]]]] = []
        self.media: list[tuple[Media, ...]] = []
        self.error: Exception | None = None
        self.entered, self.leave = threading.Event(), threading.Event()
        self.leave.set()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[list[Sample]]:
        self.calls.append(([prompt.tokens for prompt in prompts], params, [list(own) for own in seeds]))
        self.media += [prompt.media for prompt in prompts]
        self.entered.set()
        assert self.leave.wait(20)
        if self.error is not None:
            raise self.error
        return [
            [self._sample(prompt, seed, min(10, params.max_new_tokens)) for seed in own]
            for prompt, own in zip(prompts, seeds, strict=True)
        ]

    def _sample(self, prompt: Prompt, seed: int, length: int) -> Sample:
        return Sample(
            prompt_index=prompt.index,
            prompt_tokens=prompt.tokens,
            response_tokens=(seed,) * length,
            log_probs=(-1.0,) * length,
            loss_mask=(1,) * length,
            weight_versions=(3,) * length,
            text="",
            finish_reason="stop" if length == 10 else "length",
            seed=seed,
        )


def request(tokens: tuple[int, ...], seed: int, length: int, temperature: float = 1.0) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=length, temperature=temperature)
    return GenerateRequest(id=f"{tokens}-{seed}", tokens=tokens, params=params, seed=seed)


def test_what_is_asked_together_is_one_call_and_samples_of_a_prompt_stay_together() -> None:
    engines = Engines()

    async def ask() -> list[Generation]:
        generator = BatchedGenerator(engines.generate)
        asked = [request((1, 2), 5, 4), request((3,), 6, 4), request((1, 2), 7, 4)]
        return await asyncio.gather(*map(generator.generate, asked))

    answers = asyncio.run(ask())
    assert engines.calls == [([(1, 2), (3,)], SamplingParams(max_new_tokens=4), [[5, 7], [6]])]
    assert answers[2] == Generation((7,) * 4, (-1.0,) * 4, (3,) * 4, "length")


def test_equal_tokens_of_different_images_are_prompts_of_their_own() -> None:
    engines = Engines()

    async def ask() -> None:
        generator = BatchedGenerator(engines.generate)
        images = [(Media("image", key, ((0, 1),), (1, 2, 2)),) for key in "aba"]
        asked = [request((1, 2), seed, 4)._replace(media=media) for seed, media in enumerate(images)]
        await asyncio.gather(*map(generator.generate, asked))

    asyncio.run(ask())
    [(prompts, _, seeds)] = engines.calls
    assert (prompts, seeds) == ([(1, 2), (1, 2)], [[0, 2], [1]])
    assert [[medium.key for medium in own] for own in engines.media] == [["a"], ["b"]]


def test_lengths_share_a_call_within_a_factor_of_two_and_are_kept_exactly() -> None:
    engines = Engines()

    async def ask() -> list[Generation]:
        generator = BatchedGenerator(engines.generate)
        asked = [request((1,), n, n) for n in (1, 4, 5, 7, 12)] + [request((1,), 9, 5, temperature=0.5)]
        return await asyncio.gather(*map(generator.generate, asked))

    answers = asyncio.run(ask())
    assert [len(answer.tokens) for answer in answers] == [1, 4, 5, 7, 10, 5]
    assert [answer.finish_reason for answer in answers] == ["length"] * 4 + ["stop", "length"]
    assert [call[1].max_new_tokens for call in engines.calls] == [1, 7, 12, 5]


def test_what_comes_meanwhile_is_the_next_call() -> None:
    engines = Engines()
    engines.leave.clear()

    async def ask() -> None:
        generator = BatchedGenerator(engines.generate)
        first = asyncio.create_task(generator.generate(request((1,), 1, 4)))
        await asyncio.to_thread(engines.entered.wait, 20)
        rest = [asyncio.create_task(generator.generate(request((n,), n, 4))) for n in (2, 3)]
        await asyncio.sleep(0)
        rest[0].cancel()
        engines.leave.set()
        await first
        assert (await rest[1]).tokens == (3,) * 4

    asyncio.run(ask())
    assert [call[2] for call in engines.calls] == [[[1]], [[3]]]


def test_an_abort_answers_what_no_call_has() -> None:
    engines = Engines()
    engines.leave.clear()

    async def ask() -> list[Generation]:
        generator = BatchedGenerator(engines.generate)
        first = asyncio.create_task(generator.generate(request((1,), 1, 4)))
        await asyncio.to_thread(engines.entered.wait, 20)
        second = asyncio.create_task(generator.generate(request((2,), 2, 4)))
        await asyncio.sleep(0)
        await generator.abort()
        aborted = await second
        engines.leave.set()
        return [await first, aborted]

    first, second = asyncio.run(ask())
    assert (len(first.tokens), second) == (4, Generation((), (), (), "abort"))


def test_an_error_reaches_everyone_who_asked_and_no_one_after() -> None:
    engines = Engines()
    engines.error = RolloutError("the engines are closed")

    async def ask() -> None:
        generator = BatchedGenerator(engines.generate)
        asked = [asyncio.create_task(generator.generate(request((n,), n, 4))) for n in range(3)]
        for task in asked:
            with pytest.raises(RolloutError, match="closed"):
                await task
        engines.error = None
        assert (await generator.generate(request((9,), 9, 4))).tokens == (9,) * 4

    asyncio.run(ask())
