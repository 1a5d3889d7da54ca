"""Scoring groups: functions of a user, several rewards, and what happens when one misbehaves."""

from __future__ import annotations

import importlib
import math as pymath
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pluggy
import psutil
import pytest

from anygauge.config.schema import Reward
from anygauge.plugins import Plugins
from anygauge.rollout.rewards import Scorer, check_reward, exact_match, pool, raw_number, reward_functions
from anygauge.rollout.rewards.call import Call, Item
from anygauge.rollout.rewards.resolve import is_async
from anygauge_hooks import PROJECT, hookimpl, specs
from anygauge_hooks.errors import RewardError, UnknownNameError
from anygauge_hooks.rl import Group, Prompt, Sample
from anygauge_hooks.types import NamedFunction

MODULE = """
import asyncio, ctypes, json, os, re, sys, threading, time
from functools import partial

def full(response, label, metadata, *, bonus=0.0): return float(response == label) + bonus
def short(response): return float(len(response))
def open_(**arguments): return float(len(arguments))
def no_response(label): return 0.0
def positional(response, /, label): return 0.0
def needs_more(response, weight): return 0.0
def odd(question, answer): return 0.0
def raises(response): return inner(response)
def inner(response): return {}[response]
def deep(response): return json.loads(response)
async def slow(response): return 2.0
class Scale:
    def __call__(self, response, label): return 2.0
    def method(self, response): return 3.0
class Later:
    async def __call__(self, response): return 4.0
instance = Scale()
later = Later()
bound = partial(full, bonus=1.0)
bound_later = partial(slow)
number = 3
builtin = max

def where(response): return {"score": 1.0, "pid": os.getpid(), "path": sys.path[-1]}
def mixed(response): return {"score": 2, "note": response, "also": {1, 2}} if response == "dict" else 0.5
def keyed(response): return {"a": 1, "b": float("nan")} if response != "none" else {"b": 2}
def ranks(response, label, metadata, prompt):
    assert len(response) == len(label) == len(metadata) == len(prompt)
    if response[0] == "raise": raise ValueError("no group")
    if response[0] == "short": return [1.0]
    if response[0] == "nan": return [float("nan"), 1.0]
    return [float(sorted(response).index(each)) for each in response]
async def ranks_later(response): return [0.0] * len(response)

CATASTROPHE = "a" * 40 + "b"
def misbehave(response):
    match response:
        case "loop":
            while True: pass
        case "regex": re.match(r"(a+)+$", CATASTROPHE)
        case "exit": os._exit(3)
        case "leave": sys.exit(4)
        case "interrupt": raise KeyboardInterrupt
        case "segfault": ctypes.string_at(0)
        case "memory": bytearray(1 << 40)
        case "hoard": print(len([bytes(1 << 20) for _ in range(4096)]))
        case "odd": raise Odd
        case "none": return None
    return 1.0
class Odd(Exception):
    def __repr__(self): raise RuntimeError

arrived, everybody = 0, None
async def gather(response):
    global arrived, everybody
    if everybody is None: everybody = asyncio.Event()
    arrived += 1
    if arrived == int(response): everybody.set()
    await everybody.wait()
    return 1.0
async def misbehave_later(response):
    if response == "wait": await asyncio.Event().wait()
    if response == "block": re.match(r"(a+)+$", CATASTROPHE)
    if response == "child": await asyncio.create_task(child())
    if response == "memory": bytearray(1 << 40)
    if response == "raise": raise KeyError(response)
    if response == "exit": sys.exit(5)
    await asyncio.sleep(0)
    return 1.0
async def child(): os._exit(6)
def remember(response):
    with open(response, "a") as file: file.write("x")
    return 1.0
def forever(response):
    with open(response, "w") as file: file.write(str(os.getpid()))
    while True: pass
"""


def group(*texts: str, index: int = 0, label: Any = "4", length: int = 1, **metadata: Any) -> Group:
    """Return a group with one sample for each text."""
    prompt = Prompt(
        index=index, tokens=(1,), text="2+2=", label=label, source=f"t.jsonl:{index + 7}", metadata=metadata
    )
    samples = tuple(
        Sample(
            prompt_index=index,
            prompt_tokens=(1,),
            response_tokens=(2,) * length,
            log_probs=(-0.5,) * length,
            loss_mask=(1,) * length,
            weight_versions=(0,) * length,
            text=text,
            finish_reason="stop",
            seed=0,
        )
        for text in texts
    )
    return Group(prompt=prompt, samples=samples)


def plugins_with(*functions: NamedFunction) -> Plugins:
    """Return plugins of which one registers reward functions."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    plugins = Plugins(manager)
    plugins.register(
        SimpleNamespace(register_reward_functions=hookimpl(lambda: [*reward_functions(), *functions])),
        "rewards under test",
    )
    return plugins


@contextmanager
def scorer(reward: Mapping[str, Any], *functions: NamedFunction, limit: int = 8) -> Iterator[Scorer]:
    """Yield a scorer that lets every sample fail."""
    table = Reward.model_validate({"max_failed_ratio": 1.0, **reward})
    with Scorer(table, plugins_with(*functions), max_new_tokens=limit, log=None) as made:
        yield made


def rewards(groups: Sequence[Group]) -> list[float | None]:
    return [sample.reward for group in groups for sample in group.samples]


def errors(groups: Sequence[Group]) -> list[str | None]:
    return [sample.error for group in groups for sample in group.samples]


@pytest.fixture(scope="module")
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Write an importable module of a user and return its name."""
    name, folder = "user_rewards_under_test", tmp_path_factory.mktemp("user")
    (folder / f"{name}.py").write_text(MODULE)
    (folder / f"{name}_broken.py").write_text("raise RuntimeError('no licence')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield name
    sys.modules.pop(name, None)


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
            "takes 'response' by position only. It is given response, label, metadata, prompt, by name.",
        ),
        ("needs_more", {}, "needs 'weight'. It is given response, label, metadata, prompt, by name."),
        ("odd", {"weight": 1}, "needs 'question', 'answer'; does not take 'response', 'weight'."),
        (
            "full",
            {"bonsu": 1},
            "does not take 'bonsu'. It is given response, label, metadata, prompt, bonsu, by name.",
        ),
        ("full", {"label": 1}, "is given 'label' by the run and by reward.options"),
        ("builtin", {}, "has no signature that Python can read"),
        ("number", {}, "is int, not a function"),
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
        ("no_such_module_anywhere:reward", "ModuleNotFoundError"),
        ("user_rewards_under_test:missing", "has no 'missing'"),
        ("user_rewards_under_test:full.inner", "has no 'full.inner'"),
        ("user_rewards_under_test_broken:reward", "RuntimeError('no licence')"),
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
    assert outcome(value) == (None, f"f returned {value!r}")


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
        ({"acc": "1"}, "acc", "f returned '1' as 'acc'"),
        ({"acc": pymath.nan}, "acc", "f returned nan as 'acc'"),
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
        ([1, None], [(1.0, None), (None, "f returned None")]),
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
        {"function": "best", "per": "group"}, NamedFunction(name="best", fn=best, inline=True)
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
        "rank": {"function": f"{user_module}:ranks", "per": "group"},
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
    ],
)
def test_the_number_behind_a_raw_reward(raw: Any, table: Any, expected: float) -> None:
    assert raw_number(raw, Reward.model_validate(table)) == expected


# -------------------------------------------------------------------------
# Functions of a user, in processes
# -------------------------------------------------------------------------


def test_dotted_paths(user_module: str) -> None:
    """As parts of one reward, so that one process serves them all."""
    expected = {
        "full": 1.0,
        "short": 1.0,
        "open_": 4.0,
        "instance": 2.0,
        "instance.method": 3.0,
        "bound": 2.0,
        "slow": 2.0,
        "later": 4.0,
        "bound_later": 2.0,
    }
    parts: dict[str, Any] = {name: {"function": f"{user_module}:{name}"} for name in expected}
    parts["boxed"] = {"function": f"{user_module}:short", "extract": "boxed"}
    parts["options"] = {"function": f"{user_module}:full", "options": {"bonus": 0.5}}
    with scorer({"parts": parts}) as made:
        (sample,) = made.score([group("4")])[0].samples
    assert sample.raw_reward == {**expected, "boxed": 0.0, "options": 1.5}


def test_a_process_of_its_own_with_the_path_of_the_driver(user_module: str) -> None:
    with scorer({"function": f"{user_module}:where"}) as made:
        (sample,) = made.score([group("4")])[0].samples
    assert sample.raw_reward["pid"] != os.getpid()
    assert sample.raw_reward["path"] == os.path.abspath(sys.path[-1])


def test_samples_of_mixed_kinds(user_module: str) -> None:
    with scorer({"function": f"{user_module}:mixed"}) as made:
        first, second = made.score([group("dict", "float")])[0].samples
    assert (first.reward, first.raw_reward) == (2.0, {"score": 2.0, "note": "dict", "also": "{1, 2}"})
    assert (second.reward, second.raw_reward) == (0.5, 0.5)


def test_a_key_that_only_some_results_have(user_module: str) -> None:
    with scorer({"function": f"{user_module}:keyed", "key": "a"}) as made:
        scored = made.score([group("4", "none")])
    assert rewards(scored) == [1.0, None]
    assert (
        errors(scored)[1] == f"{user_module}:keyed returned a dict without 'a', which has 'b'; set reward.key"
    )
    assert scored[0].samples[0].raw_reward == {"a": 1.0, "b": "nan"}


def test_groups_are_scored_as_a_whole(user_module: str) -> None:
    with scorer({"function": f"{user_module}:ranks", "per": "group"}) as made:
        scored = made.score([group("b", "a"), group("raise", "x"), group("short", "x"), group("nan", "x")])
    assert rewards(scored) == [1.0, 0.0, None, None, None, None, None, 1.0]
    found = [error and error.removeprefix(f"{user_module}:ranks ") for error in errors(scored)]
    assert found[2] == found[3]
    assert str(found[2]).startswith(f"raised ValueError('no group') at {user_module}.py:")
    assert found[4] == found[5] == "returned 1 values for 2 samples, not a list of 2"
    assert found[6:] == ["returned nan", None]


def test_an_async_function_scores_groups(user_module: str) -> None:
    with scorer({"function": f"{user_module}:ranks_later", "per": "group"}) as made:
        assert rewards(made.score([group("b", "a"), group("c")])) == [0.0, 0.0, 0.0]


def test_a_registered_closure_is_found_by_name_in_the_process() -> None:
    closure = NamedFunction(name="closure", fn=lambda response: 1.0)
    with (
        scorer({"function": "closure"}, closure) as made,
        pytest.raises(RewardError, match=r"cannot start: UnknownNameError: Unknown name 'closure'"),
    ):
        made.score([group("4")])


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_number_of_processes_changes_nothing(user_module: str, num_workers: int) -> None:
    groups = [group(*("x" * (7 * index + each) for each in range(4)), index=index) for index in range(40)]
    with scorer({"function": f"{user_module}:short", "num_workers": num_workers}) as made:
        for _ in range(2):
            assert rewards(made.score(groups)) == [
                7 * index + each for index in range(40) for each in range(4)
            ]


# -------------------------------------------------------------------------
# What may go wrong in a process
# -------------------------------------------------------------------------

GOOD = ["fine"] * 3


def fates(function: str, kinds: Sequence[str], **table: Any) -> dict[str, str]:
    """Score misbehaving samples among good ones; return how each failed, by kind."""
    texts = [*GOOD, *(each for kind in kinds for each in (kind, *GOOD))]
    with scorer({"function": function, "timeout_s": 1.0, **table}) as made:
        (scored,) = made.score([group(*texts)])
        assert all(sample.reward == 1.0 for sample in scored.samples if sample.text not in kinds)
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3
    found = {sample.text: sample.error or "" for sample in scored.samples if sample.text in kinds}
    return {kind: error.removeprefix(f"{function} ") for kind, error in found.items()}


def test_only_the_sample_that_hangs_fails(user_module: str) -> None:
    found = fates(f"{user_module}:misbehave", ["loop", "regex"], num_workers=2)
    assert found == {"loop": "did not return in 1 s", "regex": "did not return in 1 s"}


def test_only_the_sample_that_ends_its_process_fails(user_module: str) -> None:
    found = fates(f"{user_module}:misbehave", ["exit", "segfault"])
    assert found["exit"] == "did not return: its process exited with code 3"
    assert found["segfault"] == "did not return: its process was killed by SIGSEGV"


def test_only_the_sample_that_raises_fails(user_module: str) -> None:
    found = fates(f"{user_module}:misbehave", ["leave", "interrupt", "odd", "none"])
    assert found["leave"].startswith(f"raised SystemExit(4) at {user_module}.py:")
    assert found["interrupt"].startswith(f"raised KeyboardInterrupt() at {user_module}.py:")
    assert found["odd"].startswith("raised <Odd instance at")
    assert found["none"] == "returned None"


def test_only_the_sample_that_needs_too_much_memory_fails(user_module: str) -> None:
    found = fates(f"{user_module}:misbehave", ["memory", "hoard"], memory_gib=0.5)
    assert found["memory"].startswith(f"raised MemoryError() at {user_module}.py:")
    assert found["hoard"].endswith("in <listcomp>: it has 0.5 GiB (reward.memory_gib)")


def test_only_the_async_calls_that_misbehave_fail(user_module: str) -> None:
    found = fates(f"{user_module}:misbehave_later", ["wait", "raise", "exit", "memory"], memory_gib=0.5)
    assert found["wait"] == "did not return in 1 s"
    assert found["raise"].startswith("raised KeyError('raise') at")
    assert found["exit"].startswith("raised SystemExit(5) at")
    assert found["memory"].endswith("it has 0.5 GiB (reward.memory_gib)")


def test_only_the_async_call_that_blocks_the_others_fails(user_module: str) -> None:
    assert fates(f"{user_module}:misbehave_later", ["block"]) == {"block": "did not return in 1 s"}


def test_a_crash_outside_of_every_call_is_found_by_calling_one_at_a_time(user_module: str) -> None:
    found = fates(f"{user_module}:misbehave_later", ["child"])
    assert found == {"child": "did not return: its process exited with code 6"}


def test_async_calls_overlap(user_module: str) -> None:
    """Each of the calls waits for all of them."""
    with scorer({"function": f"{user_module}:gather", "concurrency": 16}) as made:
        assert rewards(made.score([group(*["16"] * 16)])) == [1.0] * 16


def test_async_calls_are_bounded(user_module: str) -> None:
    """As above, but of three calls only two may wait at once: these do so in vain, and the third."""
    with scorer({"function": f"{user_module}:gather", "concurrency": 2, "timeout_s": 0.5}) as made:
        (scored,) = made.score([group("3", "3", "3")])
    assert [sample.reward for sample in scored.samples] == [None, None, 1.0]


def test_a_call_is_made_once(user_module: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with scorer({"function": f"{user_module}:remember", "num_workers": 2}) as made:
        made.score([group(*[str(seen)] * 50)])
    assert seen.read_text() == "x" * 50


def test_a_process_that_is_killed_between_two_steps_is_replaced(user_module: str) -> None:
    with scorer({"function": f"{user_module}:where"}) as made:
        first = made.score([group("4")])[0].samples[0].raw_reward["pid"]
        os.kill(first, signal.SIGKILL)
        second = made.score([group("4")])[0].samples[0]
    assert second.reward == 1.0
    assert second.raw_reward["pid"] != first


def test_a_silent_process_is_given_up(user_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SILENCE_GRACE_S", 0.2)
    with scorer({"function": f"{user_module}:where", "timeout_s": 0.6}) as made:
        made.score([group("4")])
        process = made._pool._processes[0]
        assert process is not None
        os.kill(process._popen.pid, signal.SIGSTOP)
        scored = made.score([group("4", "4")])
    assert rewards(scored) == [1.0, 1.0]


def test_a_module_that_fails_in_the_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = "rewards_of_one_process"
    (tmp_path / f"{name}.py").write_text(
        f"import os\nassert os.getpid() == {os.getpid()}, 'driver only'\ndef f(response): return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: sys.modules.pop(name, None) and None)
    with (
        scorer({"function": f"{name}:f"}) as made,
        pytest.raises(RewardError, match=r"cannot start: UnknownNameError.*driver only"),
    ):
        made.score([group("4")])
    with scorer({"function": f"{name}:f"}) as made:
        (error,) = errors(made.score([group("4")], tolerant=True))
    assert re.search(r"cannot start: UnknownNameError.*driver only", str(error))


def test_too_many_failures_end_the_scoring(user_module: str) -> None:
    table = {"function": f"{user_module}:misbehave", "max_failed_ratio": 0.1}
    with scorer(table) as made:
        with pytest.raises(
            RewardError, match=r"^2 of 16 samples (?s:.*)exited with code 3\n  and 14 were left"
        ):
            made.score([group(*["exit"] * 16)])
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3


def test_a_sample_that_is_left_has_no_reason_of_its_own(user_module: str) -> None:
    parts = {name: {"function": f"{user_module}:{name}"} for name in ("misbehave", "short")}
    with (
        scorer({"parts": parts, "max_failed_ratio": 0.0}) as made,
        pytest.raises(RewardError) as error,
    ):
        made.score([group(*["exit"] * 8, "fine")])
    first, reason, left = error.value.args[0].splitlines()
    assert first == "1 of 9 samples could not be scored:"
    assert reason.startswith(
        f"  1 (t.jsonl:7): misbehave: {user_module}:misbehave did not return: its process"
    )
    assert left == "  and 8 were left"


def test_what_is_scored_before_the_deadline_counts(user_module: str) -> None:
    with scorer({"function": f"{user_module}:misbehave_later"}) as made:
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3
        made._deadline_s = 1.0
        scored = made.score([group("fine", "wait")])
        made._deadline_s = 300.0
        assert rewards(made.score([group(*GOOD)])) == [1.0] * 3
    late = f"{user_module}:misbehave_later did not return in the 1 s for all samples (run.timeout_s)"
    assert errors(scored) == [None, late]


def test_a_deadline_is_for_all_samples(user_module: str) -> None:
    """Each has much longer."""
    table = Reward(function=f"{user_module}:misbehave", num_workers=2)
    with (
        Scorer(table, plugins_with(), max_new_tokens=8, log=None, deadline_s=0.5) as made,
        pytest.raises(RewardError, match=r"^9 of 9 (?s:.*) did not return in the 0\.5 s for all samples"),
    ):
        made.score([group(*["loop"] * 9)])


def test_output_and_stacks_are_in_the_log(user_module: str, tmp_path: Path) -> None:
    table = Reward(
        function=f"{user_module}:misbehave", timeout_s=1.0, max_failed_ratio=1.0, memory_gib=8, num_workers=2
    )
    log = tmp_path / "logs" / "scorer.log"
    with Scorer(table, plugins_with(), max_new_tokens=8, log=log) as made:
        scored = made.score([group("hoard", "odd", "regex")])
    written = "".join(path.read_text() for path in sorted(log.parent.glob("scorer-[01].log")))
    assert "4096\n" in written
    assert "Traceback" in written
    assert "in misbehave" in written[written.index("most recent call first") :]
    assert re.search(
        r"did not return in 1 s; its stack is in scorer-\d.log$", str(scored[0].samples[2].error)
    )


DRIVER = """
import os, signal, sys, threading
from anygauge.config.schema import Reward
from anygauge.plugins import load_plugins
from anygauge.rollout.rewards import Scorer
from anygauge_hooks.rl import Group, Prompt, Sample

folder, module, fifo, where = sys.argv[1:]
sys.path.append(folder)
empty = dict(prompt_tokens=(1,), response_tokens=(), log_probs=(), loss_mask=(), weight_versions=())
sample = Sample(prompt_index=0, **empty, text=fifo, finish_reason="stop", seed=0)
group = Group(prompt=Prompt(index=0, tokens=(1,), text=""), samples=(sample,))
scorer = Scorer(Reward(function=module + ":forever"), load_plugins(only=[]), max_new_tokens=1, log=None)

def die():
    with open(fifo) as file:
        print(file.read(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def score():
    scorer.score([group])

first, second = (score, die) if where == "main" else (die, score)
threading.Thread(target=second).start()
first()
"""


@pytest.mark.parametrize("where", ["main", "another"])
def test_a_process_ends_with_its_driver(user_module: str, tmp_path: Path, where: str) -> None:
    """Also in the middle of a call that never returns."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    module = sys.modules.get(user_module) or importlib.import_module(user_module)
    folder = str(Path(str(module.__file__)).parent)
    # The process inherits standard error, so that reading it to the end waits for the process.
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, folder, user_module, str(fifo), where],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert driver.returncode == -signal.SIGKILL
    assert driver.stderr == b""
    assert int(driver.stdout) > 0


def test_math_and_its_grader_end_with_the_scorer() -> None:
    with scorer({"function": "math"}) as made:
        assert rewards(made.score([group("4", r"\boxed{8/2}", "5")])) == [1.0, 1.0, 0.0]
        process = made._pool._processes[0]
        assert process is not None
        children = psutil.Process(process._popen.pid).children()
        assert len(children) == 1
    assert psutil.wait_procs(children, timeout=20)[1] == []
