"""Errors about a wrong ``[reward]`` before a run starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.config.load import LoadedConfig
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import NamedFunction

Load = Callable[..., LoadedConfig]
PARTS = '--reward.parts={right={function="exact_match"}}'
ONLY_PARTS = (PARTS, "--reward.function=none")


class MoreRewards:
    """A plugin with a function that has a required option."""

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        def served(response: str, *, url: str, attempts: int = 3) -> float:
            return 0.0

        return [NamedFunction(name="served", fn=served)]


@pytest.mark.parametrize(
    ("overrides", "found", "hint"),
    [
        (["--reward.function=none"], "reward.function: not set", "name a reward: exact_match"),
        ([PARTS], "reward.function: found 'exact_match'", "a reward has one function or parts"),
        ([*ONLY_PARTS, "--reward.key=acc"], "reward.key: found 'acc'", "has no effect with parts"),
        ([*ONLY_PARTS, "--reward.scope=group"], "reward.scope: found 'group'", "has no effect with parts"),
        (
            ["--reward.function=none", "--reward.parts={right={function='nope'}}"],
            "reward.parts.right.function: found 'nope'",
            "no plugin provides it; available: exact_match",
        ),
        (
            ["--reward.function=none", "--reward.parts={own={function='no_such_module:f'}}"],
            "reward.parts.own.function: found 'no_such_module:f'",
            "no module 'no_such_module'",
        ),
        (
            ["--reward.function=none", "--reward.parts={right={function='exact_match', options={loud=1}}}"],
            "reward.parts.right.options.loud: found 1",
            "'exact_match' has no such option; known: strip",
        ),
        (
            ["--data.label_key=none", *ONLY_PARTS],
            "data.label_key: not set",
            "reward 'exact_match' takes a label",
        ),
        (
            ["--data.label_key=none", "--reward.function=anygauge.rollout.rewards:f1"],
            "data.label_key: not set",
            "reward 'anygauge.rollout.rewards:f1' takes a label, without a default; name the field",
        ),
        (
            ["--reward.overlong_buffer=300"],
            "reward.overlong_buffer: found 300",
            "must be at most rollout.max_new_tokens = 256",
        ),
    ],
)
def test_a_wrong_reward(load: Load, overrides: list[str], found: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="has 1 problem:") as error:
        load({}, overrides)
    assert found in str(error.value)
    assert f"; {hint}" in str(error.value)


@pytest.mark.parametrize("function", ["with_default", "of_trl", "unreadable"])
def test_a_function_that_may_need_no_label(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Whether the data have a column of TRL's form, and whether it can be called, is checked elsewhere."""
    (tmp_path / "some_rewards.py").write_text(
        "def with_default(response, label=None): return 0.0\n"
        "def of_trl(completions, label): return [0.0]\n"
        "unreadable = max\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    load({}, ["--data.label_key=none", f"--reward.function=some_rewards:{function}"])


@pytest.mark.parametrize("key", ["run.timeout_s", "reward.timeout_s", "placement.start_timeout_s"])
@pytest.mark.parametrize("value", ["0.0", "1e300"])
def test_a_time_limit_that_nothing_can_wait_for(load: Load, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"has 1 problem:\s+{key}: found {re.escape(str(float(value)))}"):
        load({}, [f"--{key}={value}"])


@pytest.mark.parametrize(
    ("value", "hint"),
    [("0.001", "greater than or equal to 0.125"), ("1e30", "less than or equal to 1048576")],
)
def test_memory_that_no_process_can_have(load: Load, value: str, hint: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"reward\.memory_gib: found {re.escape(str(float(value)))}.*{hint}"
    ):
        load({}, [f"--reward.memory_gib={value}"])


@pytest.mark.parametrize(
    "overrides",
    [
        [*ONLY_PARTS, "--reward.overlong_buffer=256"],
        ["--run.task=sft", "--reward.function=none"],
    ],
)
def test_a_right_reward(load: Load, overrides: list[str]) -> None:
    load({}, overrides)


@pytest.mark.parametrize(
    ("reward", "found", "hint"),
    [
        ("key = 'acc'", "reward.function: not set", "name a reward"),
        ("function = 'nope'", "reward.function: found 'nope'", "no plugin provides it"),
        (
            "function = 'exact_match'\noptions = {loud = 1}",
            "reward.options.loud: found 1",
            "'exact_match' has no such option",
        ),
    ],
)
def test_a_wrong_reward_of_an_evaluation(load: Load, reward: str, found: str, hint: str) -> None:
    tables = {'eval.datasets."aime.24"': 'files = ["x"]', 'eval.datasets."aime.24".reward': reward}
    with pytest.raises(ConfigError) as error:
        load(tables, check_files=False)
    assert f"eval.datasets.aime.24.{found}" in str(error.value)
    assert f"; {hint}" in str(error.value)


@pytest.mark.parametrize(("own", "wrong"), [("", True), ("label_key = 'gold'", False)])
def test_the_label_of_an_evaluation(load: Load, own: str, wrong: bool) -> None:
    tables = {
        'eval.datasets."aime.24"': f'files = ["x"]\n{own}',
        'eval.datasets."aime.24".reward': "function = 'exact_match'",
    }
    overrides = ["--data.label_key=none", "--reward.function=json:loads"]
    if not wrong:
        load(tables, overrides, check_files=False)
        return
    with pytest.raises(
        ConfigError, match=r"eval.datasets.aime.24.label_key: not set.*; reward 'exact_match'"
    ):
        load(tables, overrides, check_files=False)


def test_an_evaluation_that_has_no_label_of_its_own(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"1 problem:\n  eval.datasets.e.label_key: not set.*'exact_match'"):
        load({"eval.datasets.e": "files = ['x']\nlabel_key = 'none'"}, check_files=False)


LEFT_OVER = ("--data.label_key=none", "--reward.function=exact_match")
EVALUATED = {"eval.datasets.e": "files = ['x']"}


@pytest.mark.parametrize(
    ("tables", "overrides"),
    [({}, ["--run.task=sft"]), (EVALUATED, ["--debug.mode=train_only", "--debug.replay_rollouts=x"])],
)
def test_a_reward_that_scores_nothing_needs_no_label(
    load: Load, tables: dict[str, str], overrides: list[str]
) -> None:
    load(tables, [*LEFT_OVER, *overrides], check_files=False)


def test_an_evaluation_in_sft_is_scored(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"data.label_key: not set.*'exact_match'"):
        load(EVALUATED, [*LEFT_OVER, "--run.task=sft"], check_files=False)


def test_an_option_that_a_function_cannot_do_without(load: Load, plugins: Plugins) -> None:
    plugins.register(MoreRewards(), "more")
    with pytest.raises(ConfigError, match=r"reward.options.url: not set.*; 'served' needs it"):
        load({}, ["--reward.function=served"])
    load({}, ["--reward.function=served", "--reward.options={url='http://x'}"])
