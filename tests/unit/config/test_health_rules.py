"""The limits of ``[health]`` by precision, and those that contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anygauge.config import Config, LoadedConfig
from anygauge.config.rules.health import logprob_limits
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


def test_the_limit_of_the_precision_counts(load: Load) -> None:
    load({"health": "logprob_abs_diff_warning = 0.25", "train": 'dtype = "bfloat16"'})
