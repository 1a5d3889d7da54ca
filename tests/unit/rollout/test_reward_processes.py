"""Functions of a user, which run in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from anygauge_hooks.errors import RewardError
from anygauge_hooks.types import NamedFunction
from anygauge_tests.scoring import errors, group, rewards, scorer


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
    """It is replaced when it is killed between two steps."""
    with scorer({"function": f"{user_module}:where"}) as made:
        first = made.score([group("4")])[0].samples[0].raw_reward
        os.kill(first["pid"], signal.SIGKILL)
        second = made.score([group("4")])[0].samples[0].raw_reward
    assert len({os.getpid(), first["pid"], second["pid"]}) == 3
    assert first["path"] == second["path"] == os.path.abspath(sys.path[-1])


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
    with scorer({"function": f"{user_module}:ranks", "scope": "group"}) as made:
        scored = made.score([group("b", "a"), group("raise", "x"), group("short", "x"), group("nan", "x")])
    assert rewards(scored) == [1.0, 0.0, None, None, None, None, None, 1.0]
    found = [error and error.removeprefix(f"{user_module}:ranks ") for error in errors(scored)]
    assert found[2] == found[3]
    assert str(found[2]).startswith(f"raised ValueError('no group') at {user_module}.py:")
    assert found[4] == found[5] == "returned 1 values for 2 samples, not a list of 2"
    assert found[6:] == ["returned nan, which is not a finite number", None]


def test_an_async_function_scores_groups(user_module: str) -> None:
    with scorer({"function": f"{user_module}:ranks_later", "scope": "group"}) as made:
        assert rewards(made.score([group("b", "a"), group("c")])) == [0.0, 0.0, 0.0]


def test_a_registered_closure_is_found_by_name_in_the_process() -> None:
    closure = NamedFunction(name="closure", fn=lambda response: 1.0)
    with (
        scorer({"function": "closure"}, closure) as made,
        pytest.raises(RewardError, match=r"cannot start: UnknownNameError: Unknown name 'closure'"),
    ):
        made.score([group("4")])


def test_several_processes_change_nothing(user_module: str) -> None:
    groups = [group(*("x" * (7 * index + each) for each in range(4)), index=index) for index in range(40)]
    with scorer({"function": f"{user_module}:short", "num_workers": 3}) as made:
        for _ in range(2):
            assert rewards(made.score(groups)) == [
                7 * index + each for index in range(40) for each in range(4)
            ]
