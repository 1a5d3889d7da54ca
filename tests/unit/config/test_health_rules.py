"""The limits of ``[health]`` by precision, and those that contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anygauge.config import Config, LoadedConfig
from anygauge.config.rules.health import health_limits, logprob_limits
from anygauge_hooks.errors import ConfigError

Load = Callable[..., LoadedConfig]


def config(**sections: Any) -> Config:
    tree = {"run": {"name": "t"}, "model": {"path": "m"}, "data": {"train": []}, **sections}
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    ("sections", "limits"),
    [
        ({}, (1e-4, 1e-3)),
        ({"train": {"dtype": "float32"}}, (1e-4, 1e-3)),
        ({"train": {"dtype": "bfloat16"}}, (0.15, 0.3)),
        ({"train": {"dtype": "float32"}, "rollout": {"dtype": "bfloat16"}}, (0.15, 0.3)),
        ({"train": {"dtype": "bfloat16"}, "rollout": {"dtype": "float32"}}, (0.15, 0.3)),
        ({"health": {"logprob_abs_diff_warning": 0.5, "logprob_abs_diff_error": None}}, (0.5, None)),
        ({"health": {"logprob_abs_diff_warning": None, "logprob_abs_diff_error": 2.0}}, (None, 2.0)),
    ],
)
def test_limits_are_of_the_lower_precision(
    sections: dict[str, Any], limits: tuple[float | None, float | None]
) -> None:
    found = logprob_limits(config(**sections))
    assert (found.warning, found.error) == limits


@pytest.mark.parametrize(
    ("rollout", "limit"),
    [
        ({}, 0),
        ({"partial_rollout": True}, None),
        ({"schedule": "one_step_off"}, 1),
        ({"schedule": "async", "max_staleness": 3}, 3),
    ],
)
def test_the_schedule_says_how_old_weights_may_be(rollout: dict[str, Any], limit: float | None) -> None:
    assert health_limits(config(rollout=rollout))["stale_weights"].value == limit


@pytest.mark.parametrize(
    ("algorithm", "limit"),
    [
        ({}, 0.95),
        ({"advantage": "reinforce_plus_plus"}, None),
        ({"advantage": "on_policy_distillation"}, None),
        ({"distill_kl_coef": 0.1}, None),
    ],
)
def test_groups_of_equal_rewards_may_teach_something(algorithm: dict[str, Any], limit: float | None) -> None:
    assert health_limits(config(algorithm=algorithm))["no_signal"].value == limit


def test_a_limit_of_the_config_takes_the_place_of_the_table() -> None:
    own = health_limits(config(health={"limits": {"truncation": 0.8, "idle_devices": None}}))
    usual = health_limits(config())
    assert (own["truncation"].value, own["idle_devices"].value) == (0.8, None)
    assert {name for name in usual if own[name] != usual[name]} == {"truncation", "idle_devices"}


def test_the_warning_gives_way_to_an_error_below_it() -> None:
    found = health_limits(config(health={"logprob_abs_diff_error": 1e-5}))["logprob_abs_diff"]
    assert (found.value, found.key) == (1e-5, "health.logprob_abs_diff_error")


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        (
            {"health": "limits = {logprob_abs_diff = 1}"},
            r"health\.limits\.logprob_abs_diff: .*keys of its own",
        ),
        ({"run": 'stop_on = ["kl"]'}, r"; did you mean 'policy_kl' or 'reference_kl'\?"),
        ({"run": 'stop_on = ["truncated"]'}, r"run\.stop_on\[0\]: .*did you mean 'truncation'\?"),
        (
            {"run": 'stop_on = ["truncation"]', "health": 'limits = {truncation = "none"}'},
            r"'truncation' never fires: health\.limits\.truncation is off",
        ),
        ({"health": "limits = {truncation = -1}"}, r"health\.limits\.truncation: found -1"),
        (
            {"health": "limits = {truncated = 1}"},
            r"health\.limits\.truncated: found 'truncated'; .*did you mean 'truncation'\?",
        ),
        ({"health": "limits = {truncation = 80}"}, r"truncation: found 80\.0; .*from 0 to 1: 80 % is 0\.8"),
    ],
)
def test_rules_and_limits_that_cannot_be(load: Load, keys: dict[str, str], refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        load(keys)


@pytest.mark.parametrize(
    ("health", "limit"),
    [
        ("logprob_abs_diff_warning = 0.002", r"0\.001 \(float32\)"),
        ("logprob_abs_diff_warning = 1\nlogprob_abs_diff_error = 0.5", r"0\.5"),
    ],
)
def test_a_warning_above_the_error_is_refused(load: Load, health: str, limit: str) -> None:
    refused = rf"health\.logprob_abs_diff_warning: .*never warns: .*logprob_abs_diff_error = {limit}"
    with pytest.raises(ConfigError, match=refused):
        load({"health": health})


@pytest.mark.parametrize(
    "health",
    [
        "logprob_abs_diff_warning = 0.0005",
        "logprob_abs_diff_warning = 0.5\nlogprob_abs_diff_error = 0.5",
        'logprob_abs_diff_warning = 0.5\nlogprob_abs_diff_error = "none"',
        'logprob_abs_diff_warning = "none"',
        "logprob_abs_diff_error = 1e-5",  # the automatic warning gives way
    ],
)
def test_limits_that_go_together(load: Load, health: str) -> None:
    load({"health": health})


def test_a_limit_of_a_count_may_be_above_one(load: Load) -> None:
    load({"health": "limits = {gradient_spike = 20, truncation = 1, host_memory = 'none'}"})


def test_the_limit_of_the_precision_counts(load: Load) -> None:
    load({"health": "logprob_abs_diff_warning = 0.25", "train": 'dtype = "bfloat16"'})
