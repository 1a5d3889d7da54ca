"""Errors about wrong rollout control before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.config.load import LoadedConfig
from anygauge.config.named_functions import option_problems
from anygauge.rollout.multi_turn import multi_turn
from anygauge_hooks.errors import ConfigError

Load = Callable[..., LoadedConfig]
FILTER = '--rollout.filters=["zero_variance"]'


@pytest.mark.parametrize(
    ("overrides", "found", "hint"),
    [
        (["--rollout.function=nope"], "rollout.function: found 'nope'", "available: single_turn, turns"),
        (["--rollout.function=nope:f"], "rollout.function: found 'nope:f'", "no module 'nope'"),
        (
            ["--rollout.function=json:lods"],
            "rollout.function: found 'json:lods'",
            "has no 'lods'. Did you",
        ),
        (["--rollout.function=turns"], "rollout.function_options.tool: not set", "'turns' needs it"),
        (
            ["--rollout.function_options={most=2}"],
            "rollout.function_options.most: found 2",
            "'single_turn' has no such option; known: none",
        ),
        (['--rollout.filters=["nope"]'], "rollout.filters: found 'nope'", "available: other, zero_variance"),
        (['--rollout.filters=["other", "other"]'], "rollout.filters: found 'other'", "is listed twice"),
        (
            [FILTER, "--rollout.filter_options={zero_variance={loud=1}}"],
            "rollout.filter_options.zero_variance.loud: found 1",
            "'zero_variance' has no such option; known: tolerance",
        ),
        (
            ["--rollout.filter_options={zero_variance={tolerance=0.1}}"],
            "rollout.filter_options.zero_variance",
            "rollout.filters has no 'zero_variance'",
        ),
        (
            [FILTER, "--rollout.samples_per_prompt=1", "--algorithm.advantage=grpo"],
            "rollout.samples_per_prompt: found 1",
            "rejects every group of one sample",
        ),
        (
            ['--rollout.after_sample=["seen"]'],
            "rollout.after_sample: found 'seen'",
            "package.module:function",
        ),
        (
            ["--rollout.partial_rollout=true"],
            "rollout.partial_rollout: found True",
            "without rollout.over_sampling",
        ),
        (
            [
                "--rollout.partial_rollout=true",
                "--rollout.over_sampling=2",
                "--rollout.requeue_discarded=false",
            ],
            "rollout.requeue_discarded: found False",
            "has no effect with rollout.partial_rollout",
        ),
        (
            ["--rollout.requeue_discarded=false"],
            "rollout.requeue_discarded: found False",
            "without rollout.over_sampling",
        ),
        (
            ["--rollout.max_num_gen_batches=0"],
            "rollout.max_num_gen_batches: found 0",
            "must be greater than 0",
        ),
    ],
)
def test_wrong_control(load: Load, overrides: list[str], found: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="has 1 problem:") as error:
        load({}, overrides)
    assert found in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("wait=true", "training waits with rollout"),
        ("concurrency=3", "affects only evaluations that training does not wait for"),
    ],
)
def test_a_step_after_the_other_waits_for_evaluations(load: Load, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load({}, [f"--eval.{key}"])
    assert said in str(error.value)


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
@pytest.mark.parametrize("key", ["over_sampling=1", "partial_rollout=true", "requeue_discarded=false"])
def test_a_schedule_that_leaves_nothing_over(load: Load, schedule: str, key: str) -> None:
    keys = [f"--rollout.schedule={schedule}", f"--rollout.{key}"]
    with pytest.raises(
        ConfigError, match=f"rollout.{key.partition('=')[0]}: found .*no effect with rollout.sch"
    ):
        load({}, keys)


def test_right_control(load: Load) -> None:
    options = "--rollout.filter_options={zero_variance={tolerance=0.1}}"
    function = ["--rollout.function=turns", "--rollout.function_options={tool='json:loads'}"]
    config = load(
        {}, [FILTER, options, *function, "--rollout.partial_rollout=true", "--rollout.over_sampling=3"]
    )
    assert config.config.rollout.filters == ("zero_variance",)


def test_options_of_a_users_filter_are_set_by_its_quoted_name(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quoted_filters").mkdir()
    source = "def solvable(group, *, least=0.0, names=()): return True"
    (tmp_path / "quoted_filters" / "rules.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    name = "quoted_filters.rules:solvable"
    path = f'--rollout.filter_options."{name}"'
    config = load(
        {}, [f'--rollout.filters=["{name}"]', f"{path}.least", "0.1", f'{path}.names=["a.b"]']
    ).config
    assert config.rollout.filter_options == {name: {"least": 0.1, "names": ["a.b"]}}
    with pytest.raises(ConfigError, match=rf"rollout\.filter_options\.{name}\.most: found 1 on the command"):
        load({}, [f'--rollout.filters=["{name}"]', f"{path}.most=1"])


@pytest.mark.parametrize(
    "key", ["over_sampling=1", "filters=['zero_variance']", "after_sample=['json:loads']", "schedule=async"]
)
def test_control_means_nothing_to_sft(load: Load, key: str) -> None:
    with pytest.raises(ConfigError, match=r'has no effect with run\.task = "sft"'):
        load({}, ["--run.task=sft", "--reward.function=none", f"--rollout.{key}"])


@pytest.mark.parametrize("tool", ["tools_that_are_not_there:calc", "json:lods", "calc"])
def test_a_tool_is_imported_before_anything_starts(load: Load, tool: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.function_options\.tool: found '{tool}'"):
        load(overrides=["--rollout.function=turns", f'--rollout.function_options={{tool="{tool}"}}'])
    load(overrides=["--rollout.function=turns", '--rollout.function_options={tool="json:loads"}'])


def test_the_tool_of_multi_turn_is_such_an_option() -> None:
    problems = [*option_problems("path", "multi_turn", multi_turn, {"tool": "tools_that_are_not_there:calc"})]
    assert [problem.path for problem in problems] == ["path.tool"]
