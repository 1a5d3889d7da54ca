"""Reward functions in TRL's form, and those that stay in the driver with a time limit."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import Config, Reward
from anygauge.plugins import load_plugins
from anygauge.rollout.rewards import Scorer
from anygauge.rollout.rewards.limited import Limited
from anygauge.trainer.run import open_scorers
from anygauge.trainer.state import TRAINING
from anygauge_hooks.types import NamedFunction
from anygauge_tests.scoring import errors, group, plugins_with, rewards

MODULE = """
def right(completions, answer, **columns):
    assert columns["prompts"] == ["2+2="] * len(completions)
    assert columns["completion_ids"] == [[2, 2]] * len(completions)
    return [float(each == own) for each, own in zip(completions, answer)]

def listed(prompts, completions, level=(1, 1)):
    return [None if text == "" else own for text, own in zip(completions, level)]

def spoken(completions, **columns):
    return [float(each[0]["content"] == "4" and each[0]["role"] == "assistant") for each in completions]

def needs_more(completions, solution):
    return [0.0] * len(completions)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "trl_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "trl_rewards"


def score(function: str, *texts: str, plugins: Any = None, **settings: Any) -> Any:
    reward = Reward(function=function, max_failed_ratio=1)
    plugins = load_plugins(only=[]) if plugins is None else plugins
    with Scorer(reward, plugins, max_new_tokens=8, log=None, **settings) as scorer:
        return scorer.score([group(*texts, length=2, answer="4", level=3)])


def test_columns_prompts_and_tokens_are_lists(module: str) -> None:
    assert rewards(score(f"{module}:right", "4", "5")) == [1.0, 0.0]


def test_the_label_has_the_name_of_its_column(module: str) -> None:
    assert errors(score(f"{module}:needs_more", "4"))[0] is not None
    assert rewards(score(f"{module}:needs_more", "4", label_key="solution")) == [0.0]


def test_a_missing_column_is_named_with_those_that_are_there(module: str) -> None:
    (error,) = errors(score(f"{module}:needs_more", "4"))
    assert "the data has no column solution; it has answer, level." in error


def test_none_adds_nothing(module: str) -> None:
    assert rewards(score(f"{module}:listed", "", "4")) == [0.0, 3.0]


def test_a_completion_of_a_chat_is_a_message(module: str) -> None:
    assert rewards(score(f"{module}:spoken", "4", "5", is_chat=True)) == [1.0, 0.0]


# -------------------------------------------------------------------------
# In the driver
# -------------------------------------------------------------------------


def inline(fn: Any, timeout_s: float = 100.0) -> Any:
    return plugins_with(NamedFunction(name="python.f", fn=Limited(timeout_s).wrap(fn), inline=True))


def test_a_wrapped_function_keeps_its_form() -> None:
    def trl(completions: list[str], answer: list[str]) -> list[float]:
        return [float(each == own) for each, own in zip(completions, answer, strict=True)]

    assert rewards(score("python.f", "4", "5", plugins=inline(trl))) == [1.0, 0.0]
    assert rewards(
        score("python.f", "4", plugins=inline(lambda response, label: float(response == label)))
    ) == [1.0]


def test_an_async_function_runs_beside_a_running_loop() -> None:
    async def judged(response: str) -> float:
        await asyncio.sleep(0)
        return len(response)

    async def main() -> Any:
        return score("python.f", "4", "55", plugins=inline(judged))

    assert rewards(asyncio.run(main())) == [1.0, 2.0]


def test_a_function_that_hangs_fails_its_samples_alone() -> None:
    never = threading.Event()

    def hangs(response: str) -> float:
        if response == "hang":
            never.wait()
        return 1.0

    groups = score("python.f", "hang", "4", plugins=inline(hangs, timeout_s=0.1))
    never.set()
    assert rewards(groups) == [None, 1.0]
    assert "the function did not return in 0.1 s" in errors(groups)[0]


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), SystemExit(3)])
def test_an_error_names_the_line_of_the_function(error: BaseException) -> None:
    def fails(response: str) -> float:
        raise error

    (reason,) = errors(score("python.f", "4", plugins=inline(fails)))
    assert type(error).__name__ in reason
    if isinstance(error, Exception):
        assert "at test_reward_trl.py:" in reason
        assert reason.endswith("in fails, `raise error`")


def test_a_run_tells_the_function_its_label_and_whether_it_chats(tmp_path: Path) -> None:
    def spoken(completions: list[Any], solution: list[str]) -> list[float]:
        return [float(each[0]["content"] == own) for each, own in zip(completions, solution, strict=True)]

    data = {"train": ["t.jsonl"], "label_key": "solution", "apply_chat_template": True}
    tables = {"run": {"name": "r"}, "model": "m", "data": data, "reward": {"function": "python.f"}}
    with ExitStack() as stack:
        scorers = open_scorers(Config.model_validate(tables), inline(spoken), [], tmp_path, stack)
        assert rewards(scorers[TRAINING].score([group("4", "5", label="4")])) == [1.0, 0.0]
