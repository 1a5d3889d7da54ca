"""Steps: over-sampling, filters, what is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from anygauge.rollout.functions import zero_variance
from anygauge.rollout.producer import Producer
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rl import Group
from anygauge_hooks.rollout import GenerateRequest
from anygauge_tests.scripted_engine import ScriptedEngine

MakeProducer = Callable[..., Producer]


def of_session(request: GenerateRequest) -> tuple[int, int]:
    """Return the group and the rollout that a request is of."""
    group, rollout = (request.session or "").split("-")
    return int(group), int(rollout)


def two_tokens(request: GenerateRequest) -> list[int]:
    return [1, 2]


def uneven(request: GenerateRequest) -> list[int]:
    """Say one token in the first rollout of a group and two in the second."""
    return [1] * (1 + of_session(request)[1])


def indices(groups: list[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def run(producer: Producer, *counts: int) -> list[list[Group]]:
    """Take steps, and close."""

    async def steps() -> list[list[Group]]:
        try:
            return [await producer.take(count, timeout_s=20) for count in counts]
        finally:
            await producer.close()

    return asyncio.run(steps())


def test_a_step_has_its_prompts_in_order_with_the_seeds_of_their_numbers(make_producer: MakeProducer) -> None:
    first, second = run(make_producer(ScriptedEngine(uneven)), 4, 4)
    assert indices(first) == [0, 1, 2, 3]
    assert indices(second) == [4, 5, 6, 7]
    assert [sample.seed for group in second for sample in group.samples][:4] == [4000, 4001, 5000, 5001]
    sample = second[0].samples[1]
    assert (sample.response_tokens, sample.text, sample.reward) == ((1, 1), "bb", 2.0)
    assert (sample.log_probs, sample.loss_mask, sample.weight_versions) == ((-0.5, -0.5), (1, 1), (0, 0))


def test_over_sampling_ends_a_step_with_the_first_that_are_done(make_producer: MakeProducer) -> None:
    slow = {1, 4}
    engine = ScriptedEngine(two_tokens, lambda request: 1 if of_session(request)[0] in slow else None)
    (groups,) = run(make_producer(engine, over_sampling=2), 4)
    assert indices(groups) == [0, 2, 3, 5]
    assert len(engine.requests) == 6 * 2
    assert len(engine.cancelled) == 4


@pytest.mark.parametrize(("requeue_discarded", "second"), [(True, [1, 4, 6, 7]), (False, [6, 7, 8, 9])])
def test_discarded_prompts_come_first_in_the_next_step_or_are_dropped_and_counted(
    make_producer: MakeProducer, requeue_discarded: bool, second: list[int]
) -> None:
    slow = {1, 4}
    engine = ScriptedEngine(two_tokens, lambda request: 1 if of_session(request)[0] in slow else None)
    producer = make_producer(engine, over_sampling=2, requeue_discarded=requeue_discarded)

    async def steps() -> list[list[int]]:
        first = await producer.take(4, timeout_s=20)
        assert producer.metrics()["rollout/unfinished_groups"] == 2
        assert producer.metrics()["rollout/dropped_prompts"] == (0 if requeue_discarded else 2)
        slow.clear()
        found = [indices(first), indices(await producer.take(4, timeout_s=20))]
        await producer.close()
        return found

    assert asyncio.run(steps()) == [[0, 2, 3, 5], second]


def test_a_filter_has_other_prompts_drawn_until_enough_groups_pass(make_producer: MakeProducer) -> None:
    def odd(group: Group) -> bool:
        return group.prompt.index % 2 == 1

    producer = make_producer(ScriptedEngine(uneven), filters=[odd])
    first, second = run(producer, 4, 4)
    assert indices(first) == [1, 3, 5, 7]
    assert indices(second) == [9, 11, 13, 15]
    assert producer.metrics()["rollout/filtered_ratio"] == 0.5


def test_equal_rewards_are_filtered_out(make_producer: MakeProducer) -> None:
    def say(request: GenerateRequest) -> list[int]:
        group, rollout = of_session(request)
        return [1] * (1 + rollout * (group % 3))

    (groups,) = run(make_producer(ScriptedEngine(say), filters=[zero_variance]), 4)
    assert indices(groups) == [1, 2, 4, 5]


def reject(group: Group) -> bool:
    return False


@pytest.mark.parametrize("epochs", [None, 1])
def test_filters_that_let_nothing_pass_end_the_step_on_a_finite_data_set(
    make_producer: MakeProducer, epochs: int | None
) -> None:
    engine = ScriptedEngine(two_tokens)
    producer = make_producer(engine, filters=[reject], epochs=epochs, max_num_gen_batches=3)
    with pytest.raises(RolloutError, match=r"needs 4 groups, and 0 passed: .*rejected by reject 1\d"):
        run(producer, 4)
    assert 12 <= len(engine.requests) // 2 <= 16


def test_a_data_source_that_ends_makes_a_smaller_step_or_an_error(make_producer: MakeProducer) -> None:
    (groups,) = run(make_producer(ScriptedEngine(uneven), epochs=1, on_incomplete_batch="smaller_step"), 17)
    assert indices(groups) == list(range(16))
    with pytest.raises(RolloutError, match="no more prompts"):
        run(make_producer(ScriptedEngine(uneven), epochs=1), 17)


def test_a_smaller_step_has_what_passed(make_producer: MakeProducer) -> None:
    def first(group: Group) -> bool:
        return group.prompt.index == 0

    producer = make_producer(
        ScriptedEngine(two_tokens), filters=[first], max_num_gen_batches=2, on_incomplete_batch="smaller_step"
    )
    (groups,) = run(producer, 4)
    assert indices(groups) == [0]


def test_an_engine_that_fails_ends_the_step_with_its_error_and_the_row(make_producer: MakeProducer) -> None:
    def fail(request: GenerateRequest) -> list[int]:
        if of_session(request) == (2, 1):
            raise RolloutError(f"no engine is left for {request.label}") from cause
        return [1]

    cause = ValueError("of a worker")
    with pytest.raises(RolloutError, match=r"no engine is left for 2-1-\d+ \(data:2\)") as error:
        run(make_producer(ScriptedEngine(fail), max_failed_ratio=1.0), 4)
    assert error.value.__cause__ is cause, "what a worker raised is shown without its traceback"


def test_a_deadline_names_what_is_open(make_producer: MakeProducer) -> None:
    engine = ScriptedEngine(two_tokens, lambda request: 1 if of_session(request) == (2, 1) else None)
    producer = make_producer(engine)

    async def late() -> None:
        try:
            await producer.take(4, timeout_s=0.2)
        finally:
            await producer.close()

    with pytest.raises(
        DeadlineError, match=r"\d of 4 groups of a step are done, .*data:2 \(\d of 2 rollouts done"
    ):
        asyncio.run(late())
    assert engine.cancelled
    assert engine.waiting == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": (0.0,)}, "2 tokens with 1 log_probs"),
        ({"weight_versions": (0, 0, 0)}, "2 tokens with 3 weight_versions"),
        ({"tokens": (1,) * 9, "log_probs": (0.0,) * 9, "weight_versions": (0,) * 9}, "at most 8"),
    ],
)
def test_what_an_engine_returns_is_checked(
    make_producer: MakeProducer, change: dict[str, Any], message: str
) -> None:
    class Odd(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Any:
            return (await super().generate(request))._replace(**change)

    with pytest.raises(RolloutError, match=message):
        run(make_producer(Odd(two_tokens)), 4)
