"""Which functions a config may name, what they may return, and the number that comes of it."""

from __future__ import annotations

import dataclasses
import importlib
import math as pymath
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from anygauge.config.schema import Reward
from anygauge.rollout.rewards import check_reward, exact_match, raw_number
from anygauge.rollout.rewards.call import Call, Item
from anygauge.rollout.rewards.resolve import is_async
from anygauge_hooks.errors import RewardError, UnknownNameError
from anygauge_hooks.types import NamedFunction
from anygauge_tests.scoring import errors, group, plugins_with, rewards, scorer

# -------------------------------------------------------------------------
# Which functions there are
# -------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match=r"'exact'.*available: dapo, exact_match, f1, math, mul"):
        check_reward(Reward(function="exact"), plugins_with())


def test_no_function_at_all() -> None:
    with pytest.raises(RewardError, match="names no reward function"):
        check_reward(Reward(), plugins_with())


def test_a_wrong_part_is_found(user_module: str) -> None:
    parts = {"good": {"function": "exact_match"}, "bad": {"function": f"{user_module}:odd"}}
    with pytest.raises(RewardError, match=r"odd' needs 'question', 'answer'"):
        check_reward(Reward.model_validate({"parts": parts}), plugins_with())


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [
        ("no_response", {}, "does not take 'response'"),
        (
            "positional",
            {},
            "takes 'response' by position only. Its signature is (response, /, label); it is given response, "
            "label, metadata, prompt, by name.",
        ),
        ("needs_more", {}, "needs 'weight'. Its signature is (response, weight); it is given response, "),
        ("odd", {"weight": 1}, "needs 'question', 'answer'; does not take 'response', 'weight'."),
        (
            "full",
            {"bonsu": 1},
            "it is given response, label, metadata, prompt, bonsu, by name.",
        ),
        ("full", {"label": 1}, "is given 'label' by the run and by reward.options"),
        ("builtin", {}, "has no signature that Python can read"),
    ],
)
def test_a_function_that_cannot_be_called(
    user_module: str, function: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RewardError) as error:
        check_reward(Reward(function=f"{user_module}:{function}", options=options), plugins_with())
    assert problem in str(error.value)
    assert function in str(error.value)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_module_anywhere:reward", "no module 'no_such_module_anywhere'"),
        ("user_rewards_under_test:missing", "has no 'missing'"),
        ("user_rewards_under_test:number", "is int, not a function"),
        ("user_rewards_under_test:full.inner", "has no 'full.inner'"),
        ("user_rewards_under_test_broken:reward", "RuntimeError('no license')"),
        (":reward", "ValueError"),
    ],
)
def test_a_path_that_leads_nowhere(user_module: str, path: str, problem: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        check_reward(Reward(function=path), plugins_with())
    assert problem in str(error.value)
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("function", "expected"),
    [("full", False), ("instance", False), ("slow", True), ("later", True), ("bound_later", True)],
)
def test_async_functions_are_known(user_module: str, function: str, expected: bool) -> None:
    assert is_async(getattr(importlib.import_module(user_module), function)) is expected


# -------------------------------------------------------------------------
# What a result may be
# -------------------------------------------------------------------------


def outcome(value: Any, key: str | None = None) -> tuple[Any, str | None]:
    return Call(name="f", fn=exact_match, key=key).outcome(value)


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1.0), np.int64(1)])
def test_numbers_of_any_kind(value: Any) -> None:
    number, error = outcome(value)
    assert type(number) is float
    assert (number, error) == (1.0, None)


@pytest.mark.parametrize("value", [None, "1", pymath.nan, pymath.inf, -pymath.inf, [1.0], 1j])
def test_what_is_no_finite_number(value: Any) -> None:
    wanted = "a finite number" if isinstance(value, float) else "a number"
    assert outcome(value) == (None, f"f returned {value!r}, which is not {wanted}")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**400, "int beyond any float"),
        (-(10**5000), "int beyond any float"),
        (2e30, "2e+30"),
        (-1e300, "-1e+300"),
        (Fraction(10**400, 3), "Fraction beyond any float"),
    ],
    ids=["integer", "long", "float32", "float64", "fraction"],
)
def test_what_float32_cannot_hold(value: Any, shown: str) -> None:
    assert outcome(value) == (None, f"f returned {shown}, too large for float32 (the limit is 1e+30)")
    assert outcome(-1e30) == (-1e30, None)


@pytest.mark.parametrize(
    ("value", "key", "error"),
    [
        ({"score": 1}, None, None),
        ({"acc": 1}, "acc", None),
        ({"acc": 1}, None, "f returned a dict without 'score', which has 'acc'; set reward.key"),
        ({}, "acc", "f returned a dict without 'acc', which has none; set reward.key"),
        ({"acc": "1"}, "acc", "f returned for 'acc' '1', which is not a number"),
        ({"acc": pymath.nan}, "acc", "f returned for 'acc' nan, which is not a finite number"),
    ],
)
def test_the_number_of_a_dict(value: Any, key: str | None, error: str | None) -> None:
    kept = None if error else {name: 1.0 for name in value}
    assert outcome(value, key) == (kept, error)


def test_a_dict_is_kept_as_plain_values() -> None:
    value = {"score": np.float32(1), "why": "x", "ok": True, "none": None, "deep": [{"a": (1, {2})}], 3: b"x"}
    kept, _ = outcome(value)
    assert kept == {
        "score": 1.0,
        "why": "x",
        "ok": True,
        "none": None,
        "deep": [{"a": [1.0, "{2}"]}],
        "3": "b'x'",
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2.0], [(1.0, None), (2.0, None)]),
        (np.array([1.0, 2.0]), [(1.0, None), (2.0, None)]),
        ([1, None], [(1.0, None), (None, "f returned None, which is not a number")]),
        ([1], [(None, "f returned 1 values for 2 samples, not a list of 2")] * 2),
        (1.0, [(None, "f returned 1.0 for 2 samples, not a list of 2")] * 2),
        ("ab", [(None, "f returned 'ab' for 2 samples, not a list of 2")] * 2),
    ],
)
def test_the_results_of_a_group(value: Any, expected: Any) -> None:
    call = Call(name="f", fn=exact_match, per_group=True)
    assert call.outcomes(value, Item(["a", "b"], [1, 1], [{}, {}], ["", ""])) == expected


# -------------------------------------------------------------------------
# Scoring in this process
# -------------------------------------------------------------------------


def test_each_sample_meets_its_own_prompt() -> None:
    with scorer({"function": "exact_match"}) as made:
        scored = made.score([group("a", "b", label="a"), group("a", "b", index=8, label="b"), group()])
    assert rewards(scored) == [1.0, 0.0, 0.0, 1.0]
    assert [sample.raw_reward for each in scored for sample in each.samples] == [1.0, 0.0, 0.0, 1.0]
    assert [each.prompt.index for each in scored] == [0, 8, 0]


def test_inline_functions_need_no_process() -> None:
    with scorer({"function": "exact_match"}) as made:
        made.start()
        made.score([group("4")])
        assert made._pool._processes == [None]


def test_a_row_that_cannot_be_judged_fails_its_samples() -> None:
    with scorer({"function": "exact_match"}) as made:
        scored = made.score([group("4", label=None), group("4")])
    assert rewards(scored) == [None, 1.0]
    assert errors(scored) == ["exact_match failed: exact_match needs a label. Set data.label_key.", None]
    assert scored[0].samples[0].raw_reward is None


def test_the_box_alone_is_compared() -> None:
    with scorer({"function": "exact_match", "extract": "boxed"}) as made:
        assert rewards(made.score([group(r"It is \boxed{4}.", "4", r"\boxed{4} or \boxed{5}")])) == [1, 0, 0]


def test_a_long_response_loses() -> None:
    table = {"function": "exact_match", "overlong_buffer": 4, "overlong_penalty": 2.0}
    with scorer(table, limit=8) as made:
        scored = made.score([group("4", length=length) for length in (4, 5, 8)])
    assert rewards(scored) == [1.0, 0.5, -1.0]
    assert [sample.raw_reward for each in scored for sample in each.samples] == [1.0, 1.0, 1.0]


def test_a_group_function_in_this_process() -> None:
    def best(response: list[str]) -> list[float]:
        return [float(each == max(response)) for each in response]

    with scorer(
        {"function": "best", "scope": "group"}, NamedFunction(name="best", fn=best, inline=True)
    ) as made:
        assert rewards(made.score([group("1", "2"), group("3", "0", "3"), group()])) == [0, 1, 1, 0, 1]


def test_dapo_needs_no_key() -> None:
    with scorer({"function": "dapo"}) as made:
        (first, second) = made.score([group("Answer: 4", "Answer: 5")])[0].samples
    assert first.raw_reward == {"score": 1.0, "acc": True, "pred": "4"}
    assert (first.reward, second.reward) == (1.0, -1.0)


def test_too_many_failures_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    groups = [group("4", index=index, label=None if index < 2 else "4") for index in range(8)]
    with scorer({"function": "exact_match", "max_failed_ratio": 0.25}) as made:
        assert rewards(made.score(groups)) == [None] * 2 + [1.0] * 6
        text = "2 of 8 samples could not be scored:\n  2 (t.jsonl:7, t.jsonl:8): exact_match failed: "
        assert caplog.messages[0].startswith(text)
        with pytest.raises(RewardError) as error:
            made.score(groups[:7])
    assert error.value.args[0].startswith("2 of 7 samples could not be scored:\n  2 (t.jsonl:7, t.jsonl:8)")
    assert "raise reward.max_failed_ratio (0.25)" in str(error.value)


def test_an_evaluation_may_fail_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    with scorer({"function": "exact_match", "max_failed_ratio": 0.0}) as made:
        scored = made.score([group("4", "5", label=None)], tolerant=True)
    assert rewards(scored) == [None, None]
    (message,) = caplog.messages
    assert message.startswith("2 of 2 samples could not be scored:\n  2 (t.jsonl:7): exact_match failed: ")


def test_a_message_lists_few_reasons_and_places() -> None:
    def picky(response: str) -> float:
        raise KeyError(response)

    texts = ["a"] * 5 + ["b"] * 3 + ["c", "c", "d", "e"]
    groups = [group(text, index=index) for index, text in enumerate(texts)]
    table = {"function": "picky", "max_failed_ratio": 0.0}
    with (
        scorer(table, NamedFunction(name="picky", fn=picky, inline=True)) as made,
        pytest.raises(RewardError) as error,
    ):
        made.score(groups)
    lines = error.value.args[0].splitlines()
    assert lines[0] == "12 of 12 samples could not be scored:"
    assert lines[1].startswith("  5 (t.jsonl:7, t.jsonl:8, t.jsonl:9, ...): picky raised KeyError('a') at")
    assert lines[3].startswith("  2 (t.jsonl:15, t.jsonl:16): picky raised KeyError('c')")
    assert lines[4:] == ["  and 2 other reasons"]


# -------------------------------------------------------------------------
# Several rewards
# -------------------------------------------------------------------------


def test_parts_are_added_up(user_module: str) -> None:
    parts = {
        "right": {"function": "exact_match", "weight": 2.0},
        "dapo": {"function": "dapo", "key": "acc", "weight": 0.5},
        "length": {"function": f"{user_module}:short", "weight": -0.25},
        "rank": {"function": f"{user_module}:ranks", "scope": "group"},
    }
    with scorer({"parts": parts}) as made:
        (first, second) = made.score([group("4", "Answer: 4")])[0].samples
    assert first.raw_reward == {
        "right": 1.0,
        "dapo": {"score": -1.0, "acc": False, "pred": "[INVALID]"},
        "length": 1.0,
        "rank": 0.0,
    }
    assert (first.reward, second.reward) == (2.0 - 0.25, 0.5 - 9 * 0.25 + 1)
    assert raw_number(first.raw_reward, Reward.model_validate({"parts": parts})) == first.reward


def test_a_part_that_fails_is_named(user_module: str) -> None:
    parts = {"right": {"function": "exact_match"}, "own": {"function": f"{user_module}:raises"}}
    with scorer({"parts": parts}) as made:
        (sample,) = made.score([group("4")])[0].samples
    assert (sample.reward, sample.raw_reward) == (None, None)
    assert sample.error is not None
    assert sample.error.startswith(f"own: {user_module}:raises raised KeyError('4') at {user_module}.py:")


def test_a_sum_beyond_float32_fails() -> None:
    huge = NamedFunction(name="huge", fn=_huge, inline=True)
    with scorer({"parts": {"a": {"function": "huge", "weight": 10.0}}}, huge) as made:
        assert errors(made.score([group("4")])) == ["the weighted sum 1e+31 is too large for float32"]


def _huge(response: str) -> float:
    return 1e30


@pytest.mark.parametrize(
    ("raw", "table", "expected"),
    [
        (0.5, {"function": "f"}, 0.5),
        ({"score": 2.0}, {"function": "f"}, 2.0),
        ({"score": 2.0, "acc": True}, {"function": "f", "key": "acc"}, 1.0),
        (
            {"a": 1.0, "b": {"score": 3.0}},
            {"parts": {"a": {"function": "f", "weight": 2}, "b": {"function": "g"}}},
            5.0,
        ),
        (0.5, {"parts": {"a": {"function": "f"}}}, 0.5),
    ],
)
def test_the_number_behind_a_raw_reward(raw: Any, table: Any, expected: float) -> None:
    assert raw_number(raw, Reward.model_validate(table)) == expected


@pytest.mark.parametrize(
    ("raw", "table", "problem"),
    [
        (
            {"solved": True},
            {"function": "f"},
            r"{'solved': True}, and the number of a dict is its key 'score'",
        ),
        ({"score": "good"}, {"function": "f"}, "{'score': 'good'}, and the number"),
        ({"a": 1.0}, {"parts": {"a": {"function": "f"}, "b": {"function": "g"}}}, "reward.parts has a, b"),
    ],
)
def test_a_raw_reward_that_does_not_go_with_the_config(raw: Any, table: Any, problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        raw_number(raw, Reward.model_validate(table))


def test_what_a_rollout_function_has_scored_keeps_its_reward() -> None:
    first = group("7", "8", label="7")
    own = dataclasses.replace(first, samples=(first.samples[0], first.samples[1]._replace(reward=0.25)))
    whole = dataclasses.replace(first, samples=tuple(each._replace(reward=0.5) for each in first.samples))
    with scorer({"function": "exact_match"}) as scoring:
        scored = scoring.score([own, whole])
    assert rewards(scored) == [1.0, 0.25, 0.5, 0.5]
    assert [each.raw_reward for each in scored[0].samples] == [1.0, 0.25]
