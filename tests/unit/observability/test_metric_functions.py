"""Metrics of the user's own functions, and of the parts of rewards."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from anygauge.observability.evaluation import eval_metrics
from anygauge.observability.metric_functions import custom_metrics
from anygauge.observability.metrics import rollout_metrics, with_step_axes
from anygauge.observability.reward_parts import PartNames, reward_part_metrics
from anygauge_hooks.errors import MetricError
from anygauge_hooks.rl import Group, Prompt
from anygauge_tests.scoring import sample


def custom(*functions: Callable[..., Any], groups: Any = (), metrics: Any = None) -> dict[str, float]:
    named = {f"f{index}": function for index, function in enumerate(functions)}
    return custom_metrics(named, groups, metrics or {}, step=3)


def test_a_function_gets_what_it_names() -> None:
    given: dict[str, Any] = {}

    def everything(**arguments: Any) -> Mapping[str, float]:
        given.update(arguments)
        return {"all": True}

    def two(step: int, metrics: Mapping[str, float], unused: float = 0.5) -> Mapping[str, float]:
        return {"a/b": metrics["train/loss"] * step, "unused": unused}

    metrics = {"train/loss": 2.0}
    result = custom(everything, two, lambda: None, groups=["group"], metrics=metrics)
    assert result == {"custom/all": 1.0, "custom/a/b": 6.0, "custom/unused": 0.5}
    assert given == {"groups": ["group"], "metrics": metrics, "step": 3}
    assert given["metrics"] is not metrics  # a function may change its own


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.array(2), torch.tensor(2.0)])
def test_numbers_of_every_library(value: Any) -> None:
    result = custom(lambda: {"n": value})
    assert result == {"custom/n": 2.0}
    assert type(result["custom/n"]) is float


def test_a_number_that_is_not_finite_is_kept_for_the_trackers() -> None:
    assert math.isnan(custom(lambda: {"n": math.nan})["custom/n"])


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0], r"'f0' returned \[1\.0\] \(list\), which is no dict of names and numbers"),
        ({"n": "0.5"}, r"returned '0\.5' \(str\) for 'n', which is no number"),
        ({"n": None}, r"returned None \(NoneType\) for 'n', which is no number"),
        ({"n": [1.0]}, r"returned \[1\.0\] \(list\) for 'n'"),
        ({"n": 1j}, r"returned 1j \(complex\) for 'n'"),
        ({"n": torch.ones(2)}, r"returned tensor\(\[1\., 1\.\]\) \(Tensor\) for 'n'"),
        ({"n": 10**400}, r"\.\.\. \(int\) for 'n', which is no number"),
        ({3: 1.0}, r"'f0' named a metric 3 \(int\)"),
        ({"step": 1.0}, r"named a metric 'step' \(str\)"),
        ({"": 1.0}, "named a metric ''"),
        ({"a//b": 1.0}, "named a metric 'a//b'"),
        ({"a b": 1.0}, "named a metric 'a b'"),
        ({"\x1b[2Kgone\n": 1.0}, r"named a metric '\\x1b\[2Kgone\\n' \(str\)"),
        ({"ü" * 101: 1.0}, r"named a metric '(\\xfc){19}\\xf?c?\.\.\."),
    ],
)
def test_what_is_no_metric_is_refused(returned: Any, told: str) -> None:
    with pytest.raises(MetricError, match=told) as caught:
        custom(lambda: returned)
    assert str(caught.value).isascii()


def test_an_exception_is_the_cause_of_an_error_that_names_function_and_step() -> None:
    def broken(metrics: Mapping[str, float]) -> None:
        del metrics["train/loss"]  # type: ignore[attr-defined]

    with pytest.raises(MetricError, match=r"'f1' failed in step 3: KeyError: 'train/loss'") as caught:
        custom(lambda: None, broken)
    assert isinstance(caught.value.__cause__, KeyError)


class Broken(float):
    def __float__(self) -> float:
        raise RuntimeError("no number today")

    def __repr__(self) -> str:
        raise RuntimeError("no text either")


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda: {"n": Broken()}, "RuntimeError: no number today"),
        (Broken, "RuntimeError: no text either"),
        (lambda: {Broken(): 1.0}, "RuntimeError: no text either"),
        (lambda: sys.exit("enough"), "SystemExit: enough"),
        (lambda: sys.exit(1), "SystemExit: 1"),
        (dict, "ValueError: no signature found"),
    ],
)
def test_whatever_a_function_or_its_values_raise_names_the_function(
    function: Callable[..., Any], told: str
) -> None:
    with pytest.raises(MetricError, match=rf"^Metric function 'f0' failed in step 3: {told}"):
        custom(function)


def test_a_signal_within_a_function_still_ends_the_run() -> None:
    with pytest.raises(SystemExit, match="143"):
        custom(lambda: sys.exit(128 + signal.SIGTERM))


def test_two_functions_may_not_return_one_metric() -> None:
    with pytest.raises(MetricError, match="'f0' and 'f1' both return 'n'"):
        custom(lambda: {"n": 1}, lambda: {"n": 1})


# -------------------------------------------------------------------------
# Parts of rewards
# -------------------------------------------------------------------------

SAMPLE = sample(reward=1.0)


def group(*raw_rewards: Any) -> Group:
    samples = [SAMPLE._replace(raw_reward=raw) for raw in raw_rewards]
    failed = SAMPLE._replace(raw_reward={"right": 100.0}, error="it failed")
    return Group(prompt=Prompt(index=0, tokens=(1,), text=""), samples=(*samples, failed))


def test_each_number_of_a_reward_is_a_metric() -> None:
    parts = [
        {"right": 1.0, "form": {"has box": True, "note": "late"}, "seconds": [1.0], "bad": math.inf},
        {"right": 0.0, "form": {"has box": False}, "only/here": np.float32(0.5), "\x1b\n": 1},
    ]
    expected = {"right": 0.5, "form/has_box": 0.5, "only_here": 0.5, "_": 1.0}
    metrics = rollout_metrics([group(*parts)], lambda raw: raw["right"])
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        f"reward/{name}": value for name, value in expected.items()
    }
    evaluated = eval_metrics("set", [group(*parts)], lambda raw: raw["right"])
    assert {name: value for name, value in evaluated.items() if "/reward/" in name} == {
        f"eval/set/reward/{name}": value for name, value in expected.items()
    }


def test_parts_never_share_a_metric_nor_take_the_axis() -> None:
    long = "k" * 60
    rewards = {
        "格式": 1,
        "答案": 0,
        "a b": 2,
        "a_b": 3,
        "": 4,
        "step": 5,
        1: 6,
        "1": 7,
        long: 8,
        f"{long}!": 9,
    }
    nested = {"x": {"step": 10, "?": 11, "!": 12}}
    names = PartNames()
    metrics = reward_part_metrics("reward/", [SAMPLE._replace(raw_reward=rewards | nested)], names)
    apart = {"格式": 1, "答案": 0, "a_b": 2, "a_b_2": 3, "_": 4, "step_": 5, "1": 6, "1_2": 7}
    apart |= {long: 8, f"{long}_2": 9, "x/step": 10, "x/_": 11, "x/__2": 12}
    assert metrics == {f"reward/{name}": value for name, value in apart.items()}
    axes = with_step_axes(metrics, 40)
    assert axes == {"reward/step": 40, **metrics}
    (later,) = [SAMPLE._replace(raw_reward={"step_": 2.0, "a_b": 1.0})]  # names are those of the first step
    assert reward_part_metrics("reward/", [later], names) == {"reward/a_b_2": 1.0, "reward/step__2": 2.0}


def test_a_run_has_only_the_first_hundred_parts(caplog: pytest.LogCaptureFixture) -> None:
    texts: list[dict[str, Any]] = [{f"said {number}": 1.0} for number in range(102)]
    names, seen = PartNames(), set[str]()
    for part in (texts[:99], texts[98:], texts[101:]):
        metrics = rollout_metrics(
            [group(*({"right": 1.0, **each} for each in part))], lambda raw: 1.0, names=names
        )
        assert metrics["reward/right"] == 1.0
        seen |= {name for name in metrics if name.startswith("reward/")}
    assert seen == {"reward/right", *(f"reward/said_{number}" for number in range(99))}
    assert caplog.messages == ["rewards have more than 100 parts: 'said_99' and later ones have no metric"]


def test_a_reward_that_is_one_number_has_no_parts() -> None:
    assert not [name for name in rollout_metrics([group(1.0)], float) if name.startswith("reward/")]
    unscored = replace(group(1.0), samples=(SAMPLE._replace(error="failed"),))
    assert not [name for name in rollout_metrics([unscored], float) if name.startswith("reward/")]
