"""Warnings of a rule: when it begins to fire, gets twice as bad, and clears."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.health.rules import NAMES, RULES, Limit, Rule, RuleName, format_value
from anygauge.health.watch import CALM, HealthWatch, watch_rules

OFF = {name: Limit(None, f"health.limits.{name}") for name in NAMES}


def rule(name: RuleName) -> Rule:
    return next(each for each in RULES if each.name == name)


def watch(name: RuleName, limit: float) -> HealthWatch:
    return watch_rules({**OFF, name: Limit(limit, f"health.limits.{name}", "note")})


def told(name: RuleName, limit: float, values: Sequence[float | None]) -> list[tuple[int, str]]:
    metric, watched = rule(name).metrics[0], watch(name, limit)
    changes = [watched.step(step, {metric: value}) for step, value in enumerate(values, 1)]
    return [(change.step, change.kind) for each in changes for change in each]


def test_a_rule_is_told_of_once_until_it_is_twice_as_bad_or_over() -> None:
    values = [0.1, 0.3, 0.35, 0.3, 0.6, 0.7, *[0.1] * (CALM - 1), 0.3, *[0.1] * CALM, 0.3]
    assert told("logprob_abs_diff", 0.2, values) == [
        *[(2, "fires"), (5, "worsens"), (6 + CALM + CALM, "clears"), (7 + CALM + CALM, "fires")]
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_what_is_no_number_fires_and_is_not_told_of_again(value: float | None) -> None:
    assert told("logprob_abs_diff", 0.2, [value] * 4) == [(1, "fires")]


def test_a_floor_fires_below_it_and_worsens_by_half() -> None:
    floor = watch("idle_devices", 0.1)
    metrics = rule("idle_devices").metrics[0]
    values = [0.5] * 10 + [0.08] * 6 + [0.03] * 10 + [0.0] * 20
    changes = [change for step, value in enumerate(values) for change in floor.step(step, {metrics: value})]
    assert [(change.kind, change.value) for change in changes] == [
        *[("fires", 0.08), ("worsens", 0.03), ("worsens", 0.015), ("worsens", 0.0)]
    ]
    assert "below health.limits.idle_devices = 10 % (note)." in changes[0].text


def test_the_message_has_step_value_limit_and_advice() -> None:
    ((change,),) = [watch("stale_weights", 1).step(7, {"rollout/lag/max": 3})]
    assert change.text == (
        "Step 7: tokens were sampled with weights 3 versions older than those that are trained, above "
        f"health.limits.stale_weights = 1 version (note). {rule('stale_weights').advice}"
    )


@pytest.mark.parametrize("metrics", [{}, {"rollout/lag/mean": 9.0}])
def test_a_step_without_the_metric_is_not_judged(metrics: dict[str, float]) -> None:
    watched = watch("stale_weights", 1)
    watched.step(1, {"rollout/lag/max": 3})
    for step in range(2, 20):
        assert not watched.step(step, metrics)
    state = next(each for each in watched.watches if each.rule.name == "stale_weights")
    assert (state.since, state.steps, state.worst) == (1, 1, 3)


def test_a_rule_that_is_off_never_fires() -> None:
    assert not watch_rules(OFF).step(1, {"rollout/lag/max": 9.0, "health/logprob_abs_diff": math.nan})


NUMBERS = st.none() | st.floats() | st.integers(-5, 5)
METRICS = sorted({name for each in RULES for name in (*each.metrics, *each.others)})


@given(st.lists(st.dictionaries(st.sampled_from(METRICS), NUMBERS), max_size=40))
def test_no_metric_whatever_it_is_breaks_a_rule_itself(steps: list[dict[str, float | None]]) -> None:
    limits = {each.name: Limit(each.limit or 0.0, "key") for each in RULES}
    watched = watch_rules(limits)
    for step, metrics in enumerate(steps, 1):
        for change in watched.step(step, metrics):
            assert change.text.startswith(f"Step {step}: ")
            assert change.value is None or math.isfinite(change.value)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.6249, "fraction", "62.5 %"),
        (0.365, "nats", "0.365 nats"),
        (1.0, "versions", "1 version"),
        (2.0, "count", "2"),
        (12.34, "times", "12.3 times"),
        (0.51, "GiB", "0.51 GiB"),
    ],
)
def test_a_value_has_its_unit(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text  # type: ignore[arg-type]
