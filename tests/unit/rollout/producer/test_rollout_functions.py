"""Rollout functions: turns, tools, several samples, what happens when they fail or hang."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from anygauge.config.schema import Data, Rollout
from anygauge.observability.reward_parts import PartNames, reward_part_metrics
from anygauge.plugins import Plugins
from anygauge.rollout import function_clock
from anygauge.rollout.function_clock import FunctionClock, OwnTime
from anygauge.rollout.functions import resolve_functions, single_turn
from anygauge.rollout.multi_turn import multi_turn
from anygauge.rollout.producer import Producer
from anygauge.rollout.text import TextTools
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import PluginError, RolloutError, UnknownNameError
from anygauge_hooks.rl import NO_VERSION, Group, Prompt, Sample
from anygauge_hooks.rollout import SESSION, GenerateRequest, Generation
from anygauge_hooks.types import NamedFunction
from anygauge_tests.scripted_engine import ScriptedEngine

MakeProducer = Callable[..., Producer]
CALCULATOR = "anygauge_tests.tools:calculator"


def take(producer: Producer, count: int = 1) -> list[Group]:
    async def step() -> list[Group]:
        try:
            return await producer.take(count, timeout_s=20)
        finally:
            await producer.close()

    return asyncio.run(step())


def says(text: TextTools, *turns: str) -> Callable[[GenerateRequest], Any]:
    """Return an engine's words: the first turn after one token, and so on."""

    def say(request: GenerateRequest) -> tuple[int, ...]:
        answers = text.decode(request.tokens).count("<result>")
        return text.encode(turns[answers])

    return say


def one(make_producer: MakeProducer, engine: ScriptedEngine, function: Any, **keys: Any) -> Sample:
    """Return the only sample of a step of one."""
    keys = {"samples_per_prompt": 1, "prompts_per_step": 1, "max_new_tokens": 200, **keys}
    ((sample,),) = [group.samples for group in take(make_producer(engine, function=function, **keys))]
    return sample


def test_a_tool_is_called_and_its_words_are_not_trained_on(
    make_producer: MakeProducer, text: TextTools
) -> None:
    engine = ScriptedEngine(says(text, "first <call>3+4</call>", "then <call>7*2</call>", "so 14"))

    async def calculating(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        return await multi_turn(rollout, prompt, seed, tool=CALCULATOR)

    sample = one(make_producer, engine, calculating)
    whole = "first <call>3+4</call><result>7</result>then <call>7*2</call><result>14</result>so 14"
    assert text.decode(sample.response_tokens) == whole
    assert sample.text == "so 14"
    told = "".join(letter for letter, mask in zip(whole, sample.loss_mask, strict=True) if not mask)
    assert told == "<result>7</result><result>14</result>"
    for log_prob, mask, version in zip(
        sample.log_probs, sample.loss_mask, sample.weight_versions, strict=True
    ):
        assert (log_prob, version) == ((-0.5, 0) if mask else (0.0, NO_VERSION))
    assert [request.params.stop for request in engine.requests] == [("</call>",)] * 3
    assert {request.session for request in engine.requests} == {"0-0"}
    budgets = [request.params.max_new_tokens + len(request.tokens) for request in engine.requests]
    assert budgets == [201, 201, 201]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"log_probs": (-0.5, math.nan)}, r"log_probs\[1\] is nan"),
        ({"log_probs": (None, -0.5)}, r"log_probs\[0\] is None"),
        ({"reward": math.inf}, "reward is inf"),
        ({"reward": "1"}, "reward is '1'"),
        ({"reward": 10**400}, "reward is int beyond any float"),
        ({"reward": 10**5000}, "reward is int beyond any float"),
    ],
)
def test_a_sample_with_what_is_no_number_is_not_whole(
    make_producer: MakeProducer, change: dict[str, Any], problem: str
) -> None:
    async def odd(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        draft = rollout.draft()
        await draft.generate()
        sample: Sample = draft.sample()
        return sample._replace(**change)

    with pytest.raises(RolloutError, match=problem):
        one(make_producer, ScriptedEngine(lambda request: [1, 2]), odd)


def test_the_parts_of_a_reward_that_no_float_holds_are_kept_as_text(make_producer: MakeProducer) -> None:
    async def scored(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        draft = rollout.draft()
        await draft.generate()
        return draft.sample()._replace(reward=1.0, raw_reward={"score": 1.0, "hits": 10**400})

    sample = one(make_producer, ScriptedEngine(lambda request: [1, 2]), scored)
    assert sample.raw_reward["hits"].startswith("int beyond any float")
    assert reward_part_metrics("reward/", [sample], PartNames()) == {"reward/score": 1.0}


@pytest.mark.parametrize("value", [math.nan, None])
def test_an_engine_that_computes_no_number_ends_the_run(make_producer: MakeProducer, value: Any) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            return (await super().generate(request))._replace(log_probs=(-0.5, value))

    with pytest.raises(RolloutError, match=f"returned the log-prob {value} of token 1 of 2"):
        take(make_producer(Broken(lambda request: [1, 2]), max_failed_ratio=1.0))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": (1, 10**9)}, f"token {10**9} as number 1 of 2, which the model does not have"),
        ({"tokens": (-1, 2)}, "token -1 as number 0 of 2"),
        ({"tokens": (1, 2.0)}, r"token 2\.0 as number 1 of 2"),
        ({"tokens": (1, 50)}, "token 50 as number 1 of 2"),
        ({"log_probs": (-0.5, 0.1)}, r"log-prob 0\.1, which is not a valid log-prob"),
    ],
)
def test_an_engine_that_returns_what_no_model_samples_ends_the_run(
    make_producer: MakeProducer, change: dict[str, Any], problem: str
) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            return (await super().generate(request))._replace(**change)

    with pytest.raises(RolloutError, match=problem):
        take(make_producer(Broken(lambda request: [1, 2]), vocab_size=50, max_failed_ratio=1.0))


@pytest.mark.parametrize(
    ("turns", "keys", "expected"),
    [
        (["<call>3/4</call>", "no"], {}, "<call>3/4</call><result>error: '3/4' is not like 3+4</result>no"),
        (["<call>1+1</call>"] * 9, {}, "<call>1+1</call><result>2</result>" * 3 + "<call>1+1</call>"),
        (["<call>1+1</call>", "2"], {"max_new_tokens": 20}, "<call>1+1</call>"),
        (["<call>1+1</call> or", "2"], {}, "<call>1+1</call> or"),
        (["1+1</call>", "2"], {}, "1+1</call>"),
    ],
)
def test_how_turns_end(
    make_producer: MakeProducer, text: TextTools, turns: list[str], keys: dict[str, Any], expected: str
) -> None:
    class Quotes(TextTools):
        def encode(self, text: str) -> tuple[int, ...]:
            return super().encode(text.replace("'", ""))

    async def calculating(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        rollout._text = Quotes(text.tokenizer, Data.model_validate({"train": ["x"]}))
        return await multi_turn(rollout, prompt, seed, tool=CALCULATOR)

    sample = one(make_producer, ScriptedEngine(says(text, *turns)), calculating, **keys)
    assert text.decode(sample.response_tokens) == expected.replace("'", "")


def test_the_budget_is_that_of_the_whole_rollout(make_producer: MakeProducer) -> None:
    left: list[int] = []

    async def several(rollout: Any, prompt: Prompt, seed: int) -> list[Sample]:
        first, second = rollout.draft(), rollout.draft()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first.generate(max_new_tokens=3))
            tasks.create_task(second.generate(max_new_tokens=9))
        left.append(rollout.remaining)
        assert first.observe([1, 2])
        assert not first.observe([1] * 10)
        await first.generate()
        left.append(rollout.remaining)
        assert (await first.generate()).finish_reason == "length"
        return [first.sample(text="f"), second.sample(text="s")]

    engine = ScriptedEngine(lambda request: [5] * (30 if request.params.max_new_tokens != 9 else 1))
    keys = {"samples_per_prompt": 1, "prompts_per_step": 1, "max_new_tokens": 12}
    (group,) = take(make_producer(engine, function=several, **keys))
    assert left == [8, 0]
    assert [len(sample.response_tokens) for sample in group.samples] == [3 + 2 + 6, 1]
    assert [sample.rollout for sample in group.samples] == [0, 0]
    assert len({request.seed for request in engine.requests}) == 3


def test_samples_of_one_rollout_share_the_reward_of_the_last(make_producer: MakeProducer) -> None:
    seen: list[int] = []

    async def fan_out(rollout: Any, prompt: Prompt, seed: int) -> Sample | list[Sample]:
        samples = []
        for length in range(1, 2 + seed % 2):
            draft = rollout.draft()
            await draft.generate(max_new_tokens=length)
            samples.append(draft.sample())
        return samples if len(samples) > 1 else samples[0]

    def score(groups: list[Group]) -> list[Group]:
        seen.extend(len(group.samples) for group in groups)
        return [
            Group(
                prompt=group.prompt,
                samples=tuple(s._replace(reward=float(len(s.response_tokens))) for s in group.samples),
            )
            for group in groups
        ]

    producer = make_producer(ScriptedEngine(lambda request: [5] * 9), function=fan_out, score=score)
    groups = take(producer, 4)
    assert seen == [2] * 4
    for group in groups:
        assert [(sample.rollout, sample.reward) for sample in group.samples] == [
            (None, 1.0),
            (1, 2.0),
            (1, 2.0),
        ]


def test_a_reward_that_a_function_gives_is_kept(make_producer: MakeProducer) -> None:
    async def own(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        draft = rollout.draft()
        await draft.generate()
        return draft.sample()._replace(reward=7.0, raw_reward=7.0)  # type: ignore[no-any-return]

    def refuse(groups: list[Group]) -> list[Group]:
        raise AssertionError("there is nothing to score")

    groups = take(make_producer(ScriptedEngine(lambda r: [1]), function=own, score=refuse), 4)
    assert {sample.reward for group in groups for sample in group.samples} == {7.0}


def test_functions_see_each_sample_in_order_before_it_is_scored(make_producer: MakeProducer) -> None:
    order: list[str] = []

    def first(sample: Sample, prompt: Prompt) -> None:
        order.append(f"first {prompt.index} {sample.seed % 2} {sample.reward}")

    async def second(sample: Sample, prompt: Prompt) -> Sample:
        await asyncio.sleep(0)
        order.append(f"second {prompt.index} {sample.seed % 2}")
        return sample._replace(text="changed")

    def score(groups: list[Group]) -> list[Group]:
        order.append("score " + " ".join(sample.text for sample in groups[0].samples))
        return [
            Group(prompt=g.prompt, samples=tuple(s._replace(reward=0.0) for s in g.samples)) for g in groups
        ]

    def keep(group: Group) -> bool:
        order.append("filter")
        return True

    producer = make_producer(
        ScriptedEngine(lambda r: [1]), after_sample=[first, second], filters=[keep], score=score
    )
    (group,) = take(producer)
    assert order[:2] == ["first 0 0 None", "first 0 1 None"]
    assert set(order[2:4]) == {"second 0 0", "second 0 1"}
    assert order[4:] == ["score changed changed", "filter"]
    assert group.samples[0].text == "changed"


async def raises(rollout: Any, prompt: Prompt, seed: int) -> Sample:
    draft = rollout.draft()
    await draft.generate()
    if prompt.index == 2:
        raise KeyError("lost")
    sample: Sample = draft.sample()
    return sample


def test_a_function_that_fails_is_named_with_prompt_and_line(make_producer: MakeProducer) -> None:
    with pytest.raises(RolloutError) as error:
        take(make_producer(ScriptedEngine(lambda r: [1]), function=raises), 4)
    assert "1 rollouts of a step failed" in str(error.value)
    assert "(data:2): raises raised KeyError('lost') at test_rollout_functions.py:" in str(error.value)


def test_some_may_fail_and_are_left_out(make_producer: MakeProducer) -> None:
    producer = make_producer(ScriptedEngine(lambda r: [1]), function=raises, max_failed_ratio=0.25)
    groups = take(producer, 4)
    errors = [[sample.error for sample in group.samples] for group in groups]
    assert [any(each) for each in errors] == [False, False, True, False]
    assert groups[2].samples[0].response_tokens == ()
    assert producer.metrics()["rollout/failed_rollouts"] == 2


async def falls_back(rollout: Any, prompt: Prompt, seed: int) -> Sample:
    with suppress(RolloutError):
        return await raises(rollout, prompt, seed)
    sample: Sample = rollout.draft().sample(text="fallback")
    return sample


def test_an_engine_error_that_a_function_catches_does_not_end_the_run(make_producer: MakeProducer) -> None:
    def fail(request: GenerateRequest) -> list[int]:
        if request.order[0] == 0:
            raise RolloutError("one request was too long")
        return [1]

    producer = make_producer(ScriptedEngine(fail), function=falls_back, max_failed_ratio=0.25)
    groups = take(producer, 4)
    assert [any(sample.error for sample in group.samples) for group in groups] == [False, False, True, False]


def wrong_length(sample: Sample, prompt: Prompt) -> Sample:
    return sample._replace(loss_mask=(1,) * 5, log_probs=())


def wrong_values(sample: Sample, prompt: Prompt) -> Sample:
    return sample._replace(loss_mask=(2,), prompt_tokens=(), prompt_index=99)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (wrong_length, "1 response_tokens with 0 log_probs; 1 response_tokens with 5 loss_mask"),
        (wrong_values, "prompt_tokens is empty; prompt_index is 99, and the prompt's 0; loss_mask has other"),
        (lambda sample, prompt: 3, "A int was returned, not a Sample"),
    ],
)
def test_a_sample_that_is_not_whole(make_producer: MakeProducer, hook: Any, message: str) -> None:
    with pytest.raises(RolloutError) as error:
        take(make_producer(ScriptedEngine(lambda r: [1]), after_sample=[hook]))
    assert message in str(error.value)


def test_a_function_that_hangs_is_ended(make_producer: MakeProducer) -> None:
    async def hangs(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        draft = rollout.draft()
        await draft.generate()
        await asyncio.Event().wait()
        sample: Sample = draft.sample()
        return sample

    producer = make_producer(
        ScriptedEngine(lambda r: [1]), function=hangs, function_timeout_s=0.05, max_failed_ratio=1.0
    )
    for group in take(producer, 2):
        for sample in group.samples:
            assert sample.error is not None
            assert "hangs took more than 0.05 s between two generations" in sample.error


def test_the_time_of_a_function_stands_still_while_the_policy_speaks(
    make_producer: MakeProducer,
) -> None:
    counts: list[bool] = []

    async def two_at_once(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        def counted() -> None:
            counts.append(rollout.own_time.since is not None)

        async def generate(draft: Any) -> None:
            await draft.generate(max_new_tokens=1)
            counted()

        drafts = [rollout.draft(), rollout.draft()]
        counted()
        await asyncio.gather(*map(generate, drafts))
        sample: Sample = drafts[0].sample()
        return sample

    one(make_producer, ScriptedEngine(lambda r: [1]), two_at_once)
    assert counts == [True, False, True]


def test_the_timer_ends_when_the_next_function_can_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(function_clock, "monotonic", lambda: now)

    async def body() -> None:
        nonlocal now
        clock, functions = FunctionClock(10_000.0), [OwnTime() for _ in range(4)]
        for place, function in enumerate(functions):
            now = 2_000.0 * place
            function.task = asyncio.create_task(asyncio.sleep(0))
            clock.begin(function)
        functions[1].pause()
        now = 10_000.0
        clock._cancel_late()
        assert [function.is_late for function in functions] == [True, False, False, False]
        assert clock._timer is not None
        assert round(clock._timer.when() - asyncio.get_running_loop().time(), -3) == 4_000
        assert [clock.end(function) for function in functions] == [True, False, False, False]
        clock._cancel_late()
        assert clock._timer is None

    asyncio.run(body())


def test_a_filter_that_fails_counts_as_a_failure(make_producer: MakeProducer) -> None:
    def odd(group: Group) -> Any:
        return group.prompt.index or "yes"

    with pytest.raises(RolloutError, match=r"odd failed: A str was returned, not a bool"):
        take(make_producer(ScriptedEngine(lambda r: [1]), filters=[odd]), 4)


def test_a_function_works_for_the_session_of_its_requests(make_producer: MakeProducer) -> None:
    """Also in its threads: a wave does not wait for those of a session that waits for it."""
    sessions: set[str | None] = set()

    async def alone(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        sessions.add(await asyncio.to_thread(SESSION.get))
        return await single_turn(rollout, prompt, seed)

    engine = ScriptedEngine(lambda r: [1])
    take(make_producer(engine, function=alone), 2)
    assert sessions == {request.session for request in engine.requests}
    assert None not in sessions


@pytest.mark.parametrize("role", ["function", "filter", "hook"])
@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
def test_a_function_that_ends_as_by_a_cancel_or_an_exit_has_failed(
    make_producer: MakeProducer, role: str, error: type[BaseException]
) -> None:
    async def ends(*_: Any) -> Any:
        raise error("of its own")

    functions: Any = {"function": {"function": ends}, "filter": {"filters": [ends]}}
    changes = functions.get(role, {"after_sample": [ends]})
    with pytest.raises(RolloutError, match=rf"ends raised {error.__name__}"):
        take(make_producer(ScriptedEngine(lambda r: [1]), **changes), 4)


def test_a_chat_goes_on_without_its_beginning_being_rendered_again(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer(tmp_path, texts=["a chat"])
    text = TextTools(tokenizer, Data.model_validate({"train": ["x"], "apply_chat_template": True}))
    start = text.decode(text.chat([{"role": "user", "content": "hi"}]), special=True)
    assert start == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    turn = text.decode(text.next_turn([{"role": "tool", "content": "7"}]), special=True)
    assert turn == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"


class Own:
    """A plugin with a rollout function and a filter."""

    @hookimpl
    def register_rollout_functions(self) -> list[NamedFunction]:
        return [NamedFunction(name="raises", fn=raises), NamedFunction(name="sync", fn=lambda *a: None)]

    @hookimpl
    def register_sample_filters(self) -> list[NamedFunction]:
        return [NamedFunction(name="longer", fn=lambda group, than=1: len(group.samples) > than)]


def test_functions_are_found_by_name_or_path_and_given_their_options() -> None:
    plugins = Plugins()
    plugins.register(Own(), "own")
    keys = {"function": "raises", "filters": ["longer", f"{__name__}:nothing"]}
    with pytest.raises(UnknownNameError, match="Filter"):
        resolve_functions(Rollout.model_validate(keys), plugins)
    keys = {"function": "raises", "filters": ["longer"], "filter_options": {"longer": {"than": 0}}}
    found = resolve_functions(Rollout.model_validate(keys), plugins)
    assert found.rollout.fn is raises
    assert found.filters[0].fn(Group(prompt=Prompt(index=0, tokens=(1,), text=""), samples=())) is False
    with pytest.raises(PluginError, match="not async"):
        resolve_functions(Rollout.model_validate({"function": "sync"}), plugins)
    with pytest.raises(UnknownNameError, match="available: raises, sync"):
        resolve_functions(Rollout.model_validate({"function": "nope"}), plugins)


def test_a_run_that_ends_lets_functions_clean_up(make_producer: MakeProducer) -> None:
    cleaned: list[int] = []

    async def holds(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        try:
            draft = rollout.draft()
            await draft.generate()
            sample: Sample = draft.sample()
            return sample
        finally:
            await asyncio.sleep(0)
            cleaned.append(seed)

    engine = ScriptedEngine(lambda request: [1, 2], lambda request: 1)
    producer = make_producer(engine, function=holds)

    async def ended() -> None:
        step = asyncio.create_task(producer.take(4))
        while len(engine.waiting) < 8:
            await asyncio.sleep(0)
        step.cancel()
        await producer.close()
        assert asyncio.all_tasks() <= {asyncio.current_task(), step}

    asyncio.run(ended())
    assert len(cleaned) == len(engine.cancelled) == 8
    assert engine.waiting == []
