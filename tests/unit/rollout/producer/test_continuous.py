"""Groups that are under way while training goes on: order, age, evaluation, pauses, state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from anygauge.rollout.evaluation import sample_groups
from anygauge.rollout.groups import group_state, rollouts_state
from anygauge.rollout.live import LiveRollout
from anygauge.rollout.producer import Continuous, Producer, RolloutsStopped
from anygauge.rollout.staleness import Staleness
from anygauge_hooks.errors import CheckpointError, DataError, RewardError, RolloutError
from anygauge_hooks.rl import Group, Prompt, SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.scripted_engine import ListSource, ScriptedEngine

MakeProducer = Callable[..., Producer]
ONE = {"samples_per_prompt": 1, "prompts_per_step": 2}


def counting(request: GenerateRequest) -> list[int]:
    return list(range(len(request.tokens), 7))


def group_of(request: GenerateRequest) -> int:
    return int((request.session or "").split("-")[0])


def indices(groups: list[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def run(producer: Producer, body: Callable[[], Awaitable[Any]]) -> Any:
    async def all_of_it() -> Any:
        try:
            return await body()
        finally:
            await producer.close()

    return asyncio.run(all_of_it())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks, and the thread that scores, bring about."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def passes() -> None:
    """Let every task that can go on do so."""
    for _ in range(200):
        await asyncio.sleep(0)


def test_groups_are_taken_in_the_order_in_which_they_were_done(make_producer: MakeProducer) -> None:
    engine = ScriptedEngine(counting, lambda request: 2)
    producer = make_producer(engine, **ONE)

    async def body() -> list[list[int]]:
        await producer.keep_going(Continuous(groups=4))
        await until(lambda: len(engine.waiting) == 4)
        started = {name.rpartition("-")[0]: name for name in engine.waiting}
        engine.release(started["3-0"])
        await until(lambda: len(engine.requests) == 5)
        engine.release(started["1-0"])
        taken = [indices(await producer.take(2, timeout_s=20))]
        await until(lambda: len(engine.waiting) == 4)
        engine.release()
        return [*taken, sorted(indices(await producer.take(2, timeout_s=20)))]

    first, second = run(producer, body)
    assert first == [3, 1]
    assert set(second) < {0, 2, 4, 5}


def test_no_group_is_older_than_the_bound_though_it_is_the_last(make_producer: MakeProducer) -> None:
    engine = ScriptedEngine(counting, lambda request: 2 if group_of(request) == 0 else None)
    producer = make_producer(engine, **ONE)
    started: list[int] = []

    async def body() -> list[list[int]]:
        await producer.keep_going(Continuous(groups=4, staleness=Staleness(1, 2)))
        first = indices(await producer.take(2, timeout_s=20))
        started.append(len(engine.requests))
        engine.version = 1
        await producer.advance(1)
        second = asyncio.create_task(producer.take(2, timeout_s=20))
        await until(lambda: len(engine.requests) == 6)
        await passes()  # those that are done would be enough
        assert not second.done()
        engine.release()
        return [first, indices(await second)]

    first, second = run(producer, body)
    assert started == [4]
    assert 0 not in first
    assert 0 in second


def test_the_trainer_may_hold_starts_back(make_producer: MakeProducer) -> None:
    allowed = 3
    engine = ScriptedEngine(counting)
    producer = make_producer(engine, **ONE)

    async def body() -> list[int]:
        nonlocal allowed
        await producer.keep_going(Continuous(groups=8, may_start=lambda untaken: untaken < allowed))
        await producer.take(2, timeout_s=20)
        before = len(engine.requests)
        allowed = 0
        await producer.take(1, timeout_s=20)
        assert len(engine.requests) <= before + 2
        return [len(engine.waiting)]

    assert run(producer, body) == [0]


def test_a_full_queue_starts_nothing(make_producer: MakeProducer) -> None:
    engine = ScriptedEngine(counting)
    producer = make_producer(engine, **ONE)

    async def body() -> int:
        await producer.keep_going(Continuous(groups=2, max_done=3))
        await until(lambda: len(engine.requests) >= 3)
        await passes()
        return len(engine.requests)

    assert run(producer, body) <= 4


def test_a_pause_lets_weights_change_in_the_middle_of_a_sample(make_producer: MakeProducer) -> None:
    held = True
    engine = ScriptedEngine(counting, lambda request: 2 if held else None)
    producer = make_producer(engine, **ONE)

    async def body() -> list[Group]:
        nonlocal held
        await producer.keep_going(Continuous(groups=2))
        await until(lambda: len(engine.waiting) == 2)
        await producer.pause()
        assert engine.waiting == []
        await passes()
        assert len(engine.requests) == 2
        engine.version, held = 5, False
        await producer.advance(5)
        await producer.resume()
        return await producer.take(2, timeout_s=20)

    for group in run(producer, body):
        assert group.samples[0].response_tokens == (1, 2, 3, 4, 5, 6)
        assert group.samples[0].weight_versions == (0, 0, 5, 5, 5, 5)


@pytest.mark.parametrize("steps", [True, False])
def test_who_waits_for_groups_is_stopped_once_the_engines_are_idle(
    make_producer: MakeProducer, steps: bool
) -> None:
    engine = ScriptedEngine(counting, lambda request: 2)
    producer = make_producer(engine, **ONE)

    async def body() -> None:
        if not steps:
            await producer.keep_going(Continuous(groups=2))
        waiting = [asyncio.create_task(producer.take(2, timeout_s=20))]
        waiting += [] if steps else [asyncio.create_task(producer.finish_open())]  # type: ignore[list-item]
        await until(lambda: len(engine.waiting) == 2)
        await producer.stop()
        assert engine.waiting == []
        async with asyncio.timeout(20):
            taken, *finished = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(taken, RolloutsStopped)
        assert finished == [None][steps:]
        with pytest.raises(RolloutsStopped):  # a step that begins just then
            await producer.take(2, timeout_s=20)
        await passes()
        assert len(engine.requests) == 2

    run(producer, body)


@pytest.mark.parametrize("steps", [True, False])
def test_what_fails_while_a_step_is_trained_is_raised_by_the_next(
    make_producer: MakeProducer, prompts: list[Prompt], steps: bool
) -> None:
    """The step before is complete by then, and can be saved."""
    source = ListSource(prompts, epochs=None)
    producer = make_producer(ScriptedEngine(counting), source=source, **ONE)

    draw = source.next

    def fail(count: int) -> Sequence[Prompt]:
        draw(count)
        raise DataError("row 3 is gone")

    async def body() -> None:
        await producer.take(2, timeout_s=20)
        source.next, before = fail, source.state_dict()  # type: ignore[method-assign]
        if steps:
            await producer.read_ahead()
        else:
            await producer.keep_going(Continuous(groups=2))
            await producer.finish_open()
        with pytest.raises(DataError, match="row 3 is gone"):
            await producer.take(2, timeout_s=20)
        assert (await producer.state_dict())["source"] == before, "a resume would leave out rows"

    run(producer, body)


def test_once_a_group_has_failed_the_engines_are_emptied(make_producer: MakeProducer) -> None:
    def fail(groups: list[Group]) -> list[Group]:
        raise RewardError("a reward failed")

    engine = ScriptedEngine(counting, lambda request: None if group_of(request) == 0 else 1)
    producer = make_producer(engine, score=fail, **ONE)

    async def body() -> None:
        await producer.keep_going(Continuous(groups=2))
        async with asyncio.timeout(20):
            await producer.finish_open()
        assert engine.waiting == []
        with pytest.raises(RewardError, match="a reward failed"):
            await producer.take(2, timeout_s=20)

    run(producer, body)


def test_a_step_whose_last_requests_end_as_it_is_stopped_is_not_taken(make_producer: MakeProducer) -> None:
    class Ending(ScriptedEngine):
        async def abort(self) -> None:
            self.release()
            await passes()  # its groups are done

    engine = Ending(counting, lambda request: 1)
    producer = make_producer(engine, **ONE)

    async def body() -> None:
        taking = asyncio.create_task(producer.take(2, timeout_s=20))
        await until(lambda: len(engine.waiting) == 2)
        await producer.stop()
        with pytest.raises(RolloutsStopped):
            await taking

    run(producer, body)


def test_an_evaluation_goes_on_beside_training_and_leaves_it_room(
    make_producer: MakeProducer, prompts: list[Prompt]
) -> None:
    engine = ScriptedEngine(
        counting, lambda request: 2 if (request.session or "").startswith("eval") else None
    )
    producer = make_producer(engine, **ONE)
    most = 0

    async def body() -> tuple[list[int], list[list[Any]]]:
        nonlocal most
        await producer.keep_going(Continuous(groups=3))
        params = SamplingParams(max_new_tokens=4, temperature=0.0)
        context = producer._context.rollout_context
        evaluation = asyncio.create_task(sample_groups(context, prompts[:5], params, [[7, 8]] * 5, at_once=3))
        await until(lambda: len(engine.waiting) == 3)
        taken = [len(await producer.take(2, timeout_s=20)) for _ in range(3)]
        while not evaluation.done():
            most = max(most, len(engine.waiting))
            engine.release()
            await asyncio.sleep(0)
        return taken, [[(s.seed, s.response_tokens) for s in own.samples] for own in await evaluation]

    taken, samples = run(producer, body)
    assert taken == [2, 2, 2]
    assert samples == [[(7, (1, 2, 3, 4)), (8, (1, 2, 3, 4))]] * 5
    assert most == 3


def test_the_state_has_every_prompt_once(make_producer: MakeProducer, prompts: list[Prompt]) -> None:
    keys: dict[str, Any] = {**ONE, "samples_per_prompt": 2}

    def engine() -> ScriptedEngine:
        return ScriptedEngine(counting, lambda request: 2 if request.session in ("1-0", "2-1") else None)

    first = make_producer(engine(), source=ListSource(prompts, epochs=1), **keys)

    async def save() -> tuple[list[int], dict[str, Any]]:
        await first.keep_going(Continuous(groups=4))
        taken = indices(await first.take(2, timeout_s=20))
        await first.pause()
        return taken, await first.state_dict()

    taken, state = run(first, save)
    state = json.loads(json.dumps(state))
    rest = engine()
    rest._holds = lambda request: None
    second = make_producer(rest, source=ListSource(prompts, epochs=1), **keys)
    second.load_state_dict(state)

    async def finish() -> list[Group]:
        await second.keep_going(Continuous(groups=4))
        return await second.take(14, timeout_s=20)

    groups = run(second, finish)
    assert sorted(taken + indices(groups)) == list(range(16))
    for group in groups:
        assert [sample.seed for sample in group.samples] == [
            1000 * group.prompt.index,
            1000 * group.prompt.index + 1,
        ]
        assert {sample.response_tokens for sample in group.samples} == {(1, 2, 3, 4, 5, 6)}
    again = [(r.session, len(r.tokens)) for r in rest.requests if r.session in ("1-0", "2-1")]
    assert all(length == 3 for _, length in again)


@pytest.mark.parametrize("key", ["source", "drawn", "open", "done"])
@pytest.mark.parametrize("value", [None, "text", [1], [{"number": 0}]], ids=repr)
def test_a_state_of_other_types_is_an_error_of_the_checkpoint(
    make_producer: MakeProducer, prompts: list[Prompt], key: str, value: Any
) -> None:
    state = {"source": ListSource(prompts).state_dict(), "drawn": 0, "open": [], "done": []}
    del state[key]
    if key != "source":  # the source itself looks at that
        state[key] = value
    with pytest.raises(CheckpointError, match="state of the rollouts cannot be read"):
        make_producer(ScriptedEngine(counting), **ONE).load_state_dict(state)


def test_an_error_between_two_steps_is_raised_by_the_next(make_producer: MakeProducer) -> None:
    def fail(request: GenerateRequest) -> list[int]:
        if group_of(request) == 3:
            raise RolloutError("the engine is gone")
        return [1]

    producer = make_producer(ScriptedEngine(fail), **ONE)

    async def body() -> None:
        await producer.keep_going(Continuous(groups=8))
        await producer.take(2, timeout_s=20)
        await until(lambda: producer._failure is not None)
        await producer.take(2, timeout_s=20)

    with pytest.raises(RolloutError, match="the engine is gone"):
        run(producer, body)


def test_what_was_begun_before_a_resume_is_waited_for_if_it_is_due(
    make_producer: MakeProducer, prompts: list[Prompt]
) -> None:
    engine = ScriptedEngine(counting)
    engine.version = 2
    producer = make_producer(engine, version=2, **ONE)
    begun = LiveRollout(producer._context, producer._gate, prompts[0], number=0, place=0, seed=0)
    begun.journal.claim(prompts[0].tokens, ()).said = Generation((1,), (-0.5,), (1,), "abort")
    done = [group_state(number, 2, Group(prompt=prompts[number], samples=())) for number in (1, 2)]
    source = ListSource(prompts)
    source.next(3)
    producer.load_state_dict(
        {"source": source.state_dict(), "drawn": 3, "open": [rollouts_state([begun], 1)], "done": done}
    )

    async def body() -> list[int]:
        await producer.keep_going(Continuous(groups=4, staleness=Staleness(1, 2)))
        return indices(await producer.take(2, timeout_s=20))

    assert 0 in run(producer, body), "a step later it would be two versions old"
