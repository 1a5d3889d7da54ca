"""Requests of one group are one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import orjson
import pytest

from anygauge.serving.sglang.client.batches import Batches, RefusedTogetherError
from anygauge.serving.sglang.client.channel import OpenFilesError
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.serving import EngineAwayError

SHORT, LONG = SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=2)


class Engine:
    """Answers each request with its seed as the only token."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.ends: list[float] = []
        self.cancelled = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.refuse: Callable[[dict[str, Any]], Exception | None] = lambda body: None
        self.batches = Batches(self.post, "the engine")

    async def post(self, data: bytes, ends: float, purpose: str) -> bytes:
        body = orjson.loads(data)
        self.bodies.append(body)
        self.ends.append(ends)
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if (error := self.refuse(body)) is not None:
            raise error
        params = body["sampling_params"]
        one = isinstance(params, dict)
        found = [answer(each["sampling_seed"]) for each in ([params] if one else params)]
        return orjson.dumps(found[0] if one else found)

    def ask(
        self, seed: int, tokens: tuple[int, ...] = (1, 2), params: SamplingParams = SHORT, **given: Any
    ) -> Coroutine[Any, Any, Generation]:
        given = {"rank": None, "ends": 60.0, **given}
        known = {key: given.pop(key) for key in ("group", "order") if key in given}
        request = GenerateRequest(str(seed), tokens, params, seed, **known)
        return self.batches.generate(request, f"r{seed}", **given)


def answer(token: int) -> dict[str, Any]:
    meta = {"id": "x", "finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, token, None]]}
    return {"meta_info": meta}


def run(check: Callable[[Engine], Awaitable[None]]) -> None:
    async def checked() -> None:
        await check(Engine())

    asyncio.run(checked())


def test_requests_of_one_prompt_are_sent_as_one() -> None:
    async def check(engine: Engine) -> None:
        asked = [engine.ask(5), engine.ask(7), engine.ask(8, (1, 3)), engine.ask(9, params=LONG)]
        asked += [engine.ask(6), engine.ask(4, rank=1)]
        generations = await asyncio.gather(*asked)
        assert [each.tokens for each in generations] == [(5,), (7,), (8,), (9,), (6,), (4,)]
        together, *alone = engine.bodies
        assert together["rid"] == ["r5", "r7", "r6"]
        assert together["input_ids"] == [[1, 2]] * 3
        assert together["return_logprob"] is True
        assert "routed_dp_rank" not in together
        assert [each["rid"] for each in alone] == ["r8", "r9", "r4"]
        assert alone[2]["routed_dp_rank"] == 1
        await asyncio.gather(*(engine.ask(seed, rank=3) for seed in (1, 2)))
        assert engine.bodies[-1]["routed_dp_rank"] == 3

    run(check)


def test_requests_that_are_sent_together_ask_for_the_adapter() -> None:
    async def check(engine: Engine) -> None:
        engine.batches = Batches(engine.post, "the engine", adapter="policy")
        await asyncio.gather(engine.ask(5), engine.ask(6))
        (together,) = engine.bodies
        assert (together["rid"], together["lora_path"]) == (["r5", "r6"], "policy")

    run(check)


def test_samples_of_a_group_go_on_together_from_different_tokens() -> None:
    """Samples that an update of the weights has ended."""

    async def check(engine: Engine) -> None:
        asked = [engine.ask(5, (1, 2, 8), group="a"), engine.ask(6, (1, 2), LONG, group="a")]
        asked += [engine.ask(7, (1, 2), group="b"), engine.ask(8, (1, 2), group="a", rank=1)]
        assert [each.tokens for each in await asyncio.gather(*asked)] == [(5,), (6,), (7,), (8,)]
        together, *alone = engine.bodies
        assert together["input_ids"] == [[1, 2, 8], [1, 2]]
        assert [each["max_new_tokens"] for each in together["sampling_params"]] == [1, 2]
        assert [each["rid"] for each in alone] == ["r7", "r8"]
        engine.bodies.clear()
        turns = [engine.ask(seed, (1, seed), group="a", order=(0, seed, 1)) for seed in (1, 2)]
        await asyncio.gather(*turns)
        assert [each["rid"] for each in engine.bodies] == ["r1", "r2"], "a second turn waits for no other"

    run(check)


def test_a_request_does_not_join_what_was_sent_before() -> None:
    async def check(engine: Engine) -> None:
        engine.answers.clear()
        first = asyncio.create_task(engine.ask(1))
        await until(lambda: len(engine.bodies) == 1)
        second = asyncio.create_task(engine.ask(2))
        await until(lambda: len(engine.bodies) == 2)
        engine.answers.set()
        assert [each.tokens for each in await asyncio.gather(first, second)] == [(1,), (2,)]

    run(check)


def test_the_last_deadline_is_that_of_all() -> None:
    async def check(engine: Engine) -> None:
        await asyncio.gather(engine.ask(1, ends=60.0), engine.ask(2, ends=50.0))
        assert engine.ends == [60.0]

    run(check)


def test_a_request_that_nobody_waits_for_is_not_sent() -> None:
    async def check(engine: Engine) -> None:
        tasks = [asyncio.create_task(engine.ask(seed)) for seed in (1, 2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        assert (await tasks[1]).tokens == (2,)
        assert [each["rid"] for each in engine.bodies] == ["r2"]
        gone = asyncio.create_task(engine.ask(3))
        await asyncio.sleep(0)
        gone.cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        assert len(engine.bodies) == 1

    run(check)


def test_the_connection_is_closed_once_nobody_waits() -> None:
    async def check(engine: Engine) -> None:
        engine.answers.clear()
        tasks = [asyncio.create_task(engine.ask(seed)) for seed in (1, 2)]
        await until(lambda: len(engine.bodies) == 1)
        tasks[0].cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        assert not engine.cancelled, "the other one still waits"
        tasks[1].cancel()
        await until(lambda: engine.cancelled == 1)

    run(check)


def test_what_is_refused_together_is_to_be_asked_for_again() -> None:
    async def check(engine: Engine) -> None:
        engine.refuse = lambda _: RolloutError("no")
        answers = await asyncio.gather(*map(engine.ask, (1, 2)), return_exceptions=True)
        assert [type(each) for each in answers] == [RefusedTogetherError] * 2
        assert len(engine.bodies) == 1
        with pytest.raises(RolloutError, match="no"):
            await engine.ask(3)

    run(check)


def test_a_lack_of_open_files_is_no_refusal() -> None:
    async def check(engine: Engine) -> None:
        engine.refuse = lambda _: OpenFilesError("too many")
        answers = await asyncio.gather(*map(engine.ask, (1, 2)), return_exceptions=True)
        assert [type(each) for each in answers] == [OpenFilesError] * 2

    run(check)


def test_long_responses_and_lists_are_sent_alone() -> None:
    async def check(engine: Engine) -> None:
        def takes(tokens: Any, params: SamplingParams) -> bool:
            return engine.batches.takes(GenerateRequest("1", tokens, params, 0))

        assert takes((1, 2), SamplingParams(max_new_tokens=256))
        assert not takes((1, 2), SamplingParams(max_new_tokens=257))
        assert not takes([1, 2], SHORT)
        assert not takes((1, 2), SamplingParams(max_new_tokens=1, stop=["a"]))  # type: ignore[arg-type]

    run(check)


def test_an_engine_that_is_away_is_away_for_all() -> None:
    async def check(engine: Engine) -> None:
        engine.refuse = lambda _: EngineAwayError("gone")
        answers = await asyncio.gather(*map(engine.ask, (1, 2)), return_exceptions=True)
        assert [type(each) for each in answers] == [EngineAwayError] * 2
        assert len(engine.bodies) == 1, "who waits decides where to ask again"

    run(check)


@pytest.mark.parametrize("data", [b"[]", b"{}", b"7", b"<html>"])
def test_an_answer_to_another_number_of_requests(data: bytes) -> None:
    async def check(engine: Engine) -> None:
        async def post(*_: Any) -> bytes:
            return data

        batches = Batches(post, "the engine")
        asked = (
            batches.generate(GenerateRequest(str(seed), (1,), SHORT, seed), f"r{seed}", rank=None, ends=1.0)
            for seed in (1, 2)
        )
        with pytest.raises(RefusedTogetherError, match="the engine returned an invalid generation"):
            await asyncio.gather(*asked)

    run(check)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0)
