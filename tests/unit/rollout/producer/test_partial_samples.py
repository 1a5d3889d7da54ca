"""Samples that are cut short and go on: every token once, within the exact budget."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anygauge.rollout import live
from anygauge.rollout.gate import Gate
from anygauge.rollout.producer import Producer
from anygauge.rollout.text import TextTools
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Group, Sample, SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.scripted_engine import ScriptedEngine

MakeProducer = Callable[..., Producer]
ENDLESS = 12


def counting(request: GenerateRequest) -> list[int]:
    """Say after ``n`` tokens ``n``, up to twelve tokens in all; the prompt is one of them."""
    return list(range(len(request.tokens), ENDLESS + 1))


def only(groups: list[Group]) -> Sample:
    (sample,) = groups[0].samples
    return sample


class Interrupted(ScriptedEngine):
    """Cuts the generations of group 0 short after so many tokens each, with new weights every time."""

    def __init__(self, cuts: list[int]) -> None:
        super().__init__(counting)
        self._cuts = list(cuts)

    async def generate(self, request: GenerateRequest) -> Generation:
        said = await super().generate(request)
        if not self._cuts or self._cuts[0] >= len(said.tokens):
            return said
        cut = self._cuts.pop(0)
        self.version += 1
        return Generation(*(values[:cut] for values in said[:3]), "abort")  # type: ignore[arg-type]


async def only_sample(producer: Any) -> Sample:
    try:
        return only(await producer.take(1, timeout_s=20))
    finally:
        await producer.close()


@given(cuts=st.lists(st.integers(0, 8), max_size=5), budget=st.integers(1, 15))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sample_goes_on_after_a_cut_at_any_token(
    make_producer: MakeProducer, cuts: list[int], budget: int
) -> None:
    engine = Interrupted(cuts)
    keys = {"samples_per_prompt": 1, "prompts_per_step": 1, "max_new_tokens": budget}
    producer = make_producer(engine, **keys)

    sample = asyncio.run(only_sample(producer))
    length = min(budget, ENDLESS)
    assert sample.response_tokens == tuple(range(1, length + 1))
    assert sample.finish_reason == ("length" if budget < ENDLESS else "stop")
    assert len(sample.log_probs) == len(sample.weight_versions) == len(sample.loss_mask) == length
    asked = [(len(request.tokens) - 1, request.params.max_new_tokens) for request in engine.requests]
    assert all(have + limit == budget for have, limit in asked)
    bounds = [have for have, _ in asked] + [length]
    versions = [version for version in range(len(asked)) for _ in range(bounds[version], bounds[version + 1])]
    assert list(sample.weight_versions) == versions
    assert len({request.id for request in engine.requests}) == len(engine.requests)
    assert len({request.seed for request in engine.requests}) == len(set(bounds[:-1]))


def test_what_a_step_leaves_over_goes_on_in_the_next(make_producer: MakeProducer) -> None:
    slow = {"1-0"}
    engine = ScriptedEngine(counting, lambda request: 3 if request.session in slow else None)
    producer = make_producer(
        engine, samples_per_prompt=1, max_new_tokens=5, over_sampling=1, partial_rollout=True
    )

    async def steps() -> list[list[Group]]:
        first = await producer.take(4, timeout_s=20)
        assert engine.waiting == []
        engine.version = 1
        await producer.advance(1)
        slow.clear()
        second = await producer.take(4, timeout_s=20)
        await producer.close()
        return [first, second]

    first, second = asyncio.run(steps())
    assert [group.prompt.index for group in first] == [0, 2, 3, 4]
    assert [group.prompt.index for group in second] == [1, 5, 6, 7]
    sample = only(second)
    assert sample.response_tokens == (1, 2, 3, 4, 5)
    assert sample.weight_versions == (0, 0, 0, 1, 1)
    assert (engine.aborts, engine.cancelled) == (1, [])
    assert producer.metrics()["rollout/continued_tokens"] == 3


def test_a_resume_goes_on_with_the_tokens_that_are_there(make_producer: MakeProducer) -> None:
    slow = {"1-0", "1-1"}

    def engine() -> ScriptedEngine:
        return ScriptedEngine(counting, lambda request: 3 if request.session in slow else None)

    keys: dict[str, Any] = {"max_new_tokens": 5, "over_sampling": 2, "partial_rollout": True}

    async def first() -> dict[str, Any]:
        producer = make_producer(engine(), **keys)
        await producer.take(4, timeout_s=20)
        state = await producer.state_dict()
        saved: dict[str, Any] = json.loads(json.dumps(state))
        slow.clear()
        await producer.take(4, timeout_s=20)
        assert json.loads(json.dumps(state)) == saved, "what follows does not change it"
        await producer.close()
        return saved

    state = asyncio.run(first())
    assert [entry["number"] for entry in state["open"]] == [1]
    assert [entry["number"] for entry in state["done"]] == [5]
    resumed = engine()
    resumed.version = 1

    async def second() -> list[Group]:
        producer = make_producer(resumed, version=1, **keys)
        producer.load_state_dict(state)
        try:
            return await producer.take(4, timeout_s=20)
        finally:
            await producer.close()

    groups = asyncio.run(second())
    assert [group.prompt.index for group in groups][:2] == [1, 5]
    assert {sample.weight_versions for sample in groups[0].samples} == {(0, 0, 0, 1, 1)}
    assert {sample.weight_versions for sample in groups[1].samples} == {(0, 0, 0, 0, 0)}
    assert groups[2].samples[1].seed == 1000 * groups[2].prompt.index + 1
    assert [(r.session, len(r.tokens)) for r in resumed.requests][:2] == [("1-0", 4), ("1-1", 4)]


@pytest.mark.parametrize("cut", [2, 3, 4, 5])
def test_a_stop_string_across_a_cut_ends_the_sample(
    make_producer: MakeProducer, text: TextTools, cut: int
) -> None:
    whole = text.encode("xy</c>zzz")

    class Engine(Interrupted):
        async def generate(self, request: GenerateRequest) -> Generation:
            have = len(request.tokens) - 1
            self._say = lambda _: whole[have:]
            return await super().generate(request)

    producer = make_producer(
        Engine([cut]), samples_per_prompt=1, prompts_per_step=1, max_new_tokens=9, stop=("</c>",)
    )

    sample = asyncio.run(only_sample(producer))
    assert (sample.text, sample.finish_reason) == ("xy</c>", "stop")
    assert len(sample.log_probs) == len(sample.weight_versions) == len(sample.response_tokens) == 6


def test_an_engine_that_never_gets_anywhere_is_an_error(
    make_producer: MakeProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_EMPTY", 5)
    producer = make_producer(Interrupted([0] * 100), max_failed_ratio=1.0)

    async def steps() -> None:
        try:
            await producer.take(4, timeout_s=20)
        finally:
            await producer.close()

    with pytest.raises(RolloutError, match="short 6 times without a token"):
        asyncio.run(steps())


def test_a_gate_that_is_closed_again_at_once_lets_nothing_through() -> None:
    """As where enough groups of the step before were done, and others wait to go on."""
    engine = ScriptedEngine(counting)

    async def work() -> None:
        gate = Gate(engine)
        request = GenerateRequest("0", (1,), SamplingParams(max_new_tokens=3), seed=0)
        task = asyncio.create_task(gate.generate(request))
        await asyncio.sleep(0)
        gate.open()
        await gate.close()
        await asyncio.sleep(0.01)
        assert engine.requests == []
        gate.open()
        await task

    asyncio.run(work())


@pytest.mark.parametrize(("drain_s", "aborts"), [(0.0, True), (0.01, True), (60.0, False)])
def test_a_gate_waits_for_requests_before_it_aborts_them(drain_s: float, aborts: bool) -> None:
    engine = ScriptedEngine(counting, holds=lambda request: 1)

    async def work() -> None:
        gate = Gate(engine)
        gate.open()
        request = GenerateRequest("0", (1,), SamplingParams(max_new_tokens=3), seed=0)
        task = asyncio.create_task(gate.generate(request))
        await asyncio.sleep(0)
        if not aborts:
            asyncio.get_running_loop().call_later(0.01, engine.release)
        await gate.close(drain_s)
        assert not gate.under_way
        assert (await task).finish_reason == ("abort" if aborts else "length")
        assert bool(engine.aborts) == aborts

    asyncio.run(work())


def test_the_rollouts_of_a_prompt_tell_the_engines_that_they_begin_alike(make_producer: MakeProducer) -> None:
    engine = ScriptedEngine(counting)

    async def steps() -> None:
        producer = make_producer(engine, prompts_per_step=1)
        await producer.take(1, timeout_s=20)
        await producer.close()

    asyncio.run(steps())
    assert [(request.group, request.session) for request in engine.requests] == [("0", "0-0"), ("0", "0-1")]
