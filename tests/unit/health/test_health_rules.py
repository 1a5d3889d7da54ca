"""Each rule fires on the series of its fault, and stays silent on that of a healthy run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest

from anygauge.health.rules import NAMES, RULES, Limit, RuleName
from anygauge.health.watch import watch_rules

Metrics = Mapping[str, float]
LIMITS = {
    rule.name: Limit(rule.limit, f"health.limits.{rule.name}") for rule in RULES if rule.limit is not None
} | {"logprob_abs_diff": Limit(1e-4, "warning"), "stale_weights": Limit(1.0, "schedule")}

HEALTHY: Metrics = {
    "health/logprob_abs_diff": 4e-7,
    "train/loss": 0.01,
    "train/grad_norm": 1.5,
    "train/entropy_loss": 0.6,
    "train/ppo_kl": 0.01,
    "train/kl_loss": 0.02,
    "rollout/lag/max": 1,
    "rollout/reward_std": 0.45,
    "rollout/zero_std_ratio": 0.2,
    "rollout/filtered_ratio": 0.0,
    "rollout/truncated_ratio": 0.05,
    "rollout/repetition_frac": 0.01,
    "rollout/failed_ratio": 0.0,
    "perf/idle_servers": 0,
    "passrate/pass@1": 0.4,
    "passrate/pass@2": 0.5,
    "perf/device_utilization_min": 0.6,
    "perf/driver_rss_gib": 0.5,
    "perf/worker_rss_gib": 2.0,
    "perf/host_memory_ratio": 0.4,
}
"""Metrics of a step as a run has them that goes well."""


def fired(steps: Iterable[Metrics], limits: Mapping[RuleName, Limit] = LIMITS) -> dict[RuleName, int]:
    """Return the rules that fire, with the first step at which each does."""
    watch = watch_rules(limits)
    changes = [change for step, metrics in enumerate(steps, 1) for change in watch.step(step, metrics)]
    return {change.rule: change.step for change in reversed(changes) if change.kind == "fires"}


def steps(count: int, /, **courses: Sequence[float]) -> list[Metrics]:
    """Return healthy steps in which some metrics take given values; the last value repeats.

    :param courses: By name, with ``__`` for ``/`` and without ``@``.
    """
    names = {name: next(key for key in HEALTHY if _word(key) == name) for name in courses}
    return [
        {**HEALTHY, **{names[name]: course[min(step, len(course) - 1)] for name, course in courses.items()}}
        for step in range(count)
    ]


def _word(name: str) -> str:
    return name.replace("/", "__").replace("@", "")


def course(*parts: tuple[int, float]) -> list[float]:
    """Return a series from lengths and values."""
    return [value for count, value in parts for _ in range(count)]


FAULTS: Mapping[RuleName, tuple[list[Metrics], int]] = {
    "logprob_abs_diff": (steps(5, health__logprob_abs_diff=course((2, 4e-7), (3, 0.02))), 3),
    "stale_weights": (steps(5, rollout__lag__max=course((3, 1), (1, 2))), 4),
    "no_signal": (steps(20, rollout__zero_std_ratio=course((5, 0.3), (15, 0.97))), 11),
    "truncation": (steps(20, rollout__truncated_ratio=course((5, 0.1), (15, 0.8))), 11),
    "repetition": (steps(10, rollout__repetition_frac=course((3, 0.0), (7, 0.3))), 6),
    "failed_samples": (steps(10, rollout__failed_ratio=course((3, 0.0), (7, 0.1))), 6),
    "entropy_collapse": (steps(20, train__entropy_loss=course((8, 0.7), (12, 0.05))), 11),
    "policy_kl": (steps(10, train__ppo_kl=course((1, 0.01), (9, 0.3))), 5),
    "reference_kl": (steps(10, train__kl_loss=course((1, 0.01), (9, 3.0))), 5),
    "gradient_spike": (steps(20, train__grad_norm=course((16, 1.5), (1, 60.0), (1, 1.5))), 17),
    "idle_devices": (steps(20, perf__device_utilization_min=course((5, 0.5), (15, 0.01))), 11),
    "idle_servers": (steps(10, perf__idle_servers=course((3, 0), (7, 1))), 6),
    "memory_growth": (steps(60, perf__worker_rss_gib=[2 + 0.04 * step for step in range(60)]), 60),
    "host_memory": (steps(5, perf__host_memory_ratio=course((2, 0.9), (3, 0.97))), 4),
}
"""Steps with the fault of each rule, and the step at which the rule fires."""


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_fires_on_its_fault_alone(name: RuleName) -> None:
    series, first = FAULTS[name]
    assert fired(series) == {name: first}


def test_healthy_steps_fire_nothing_and_judge_every_rule() -> None:
    watch = watch_rules(LIMITS)
    assert not [change for step in range(1, 200) for change in watch.step(step, HEALTHY)]
    assert all(each.value is not None for each in watch.watches)


def disturbed() -> Iterator[tuple[str, list[Metrics]]]:
    """Yield what healthy runs do now and then."""
    yield "one bad step", steps(40, train__ppo_kl=course((3, 0.01), (1, 0.4), (1, 0.01)))
    yield "a large first update", steps(20, train__ppo_kl=course((1, 0.26), (1, 0.012)))
    yield "one step of long answers", steps(40, rollout__truncated_ratio=course((9, 0.1), (3, 0.9), (9, 0.1)))
    yield "gradients that vary", steps(60, train__grad_norm=[1.0, 9.0, 0.5, 30.0, 4.5] * 12)
    yield "no gradient at first", steps(20, train__grad_norm=course((12, 0.0), (8, 1.0)))
    yield (
        "a task that is solved wholly",
        steps(
            20,
            train__entropy_loss=course((10, 0.7), (10, 0.01)),
            passrate__pass1=course((10, 0.4), (10, 1.0)),
        ),
    )
    yield (
        "a policy that fails more and is as sure",
        steps(
            20, train__entropy_loss=course((10, 0.7), (10, 0.2)), passrate__pass1=course((10, 0.9), (10, 0.1))
        ),
    )
    yield "a step without gradient", steps(60, train__grad_norm=[1.0, 0.0, 0.0] * 20)
    yield (
        "a task that is solved",
        steps(
            60,
            train__entropy_loss=course((10, 0.7), (10, 0.2), (40, 0.01)),
            passrate__pass1=course((10, 0.3), (10, 0.7), (40, 0.97)),
            rollout__zero_std_ratio=course((10, 0.1), (10, 0.4), (40, 0.85)),
        ),
    )
    yield (
        "memory of the first steps",
        steps(60, perf__worker_rss_gib=[2 + min(step, 20) / 10 for step in range(60)]),
    )
    yield (
        "memory that comes and goes",
        steps(120, perf__driver_rss_gib=[0.5 + step % 30 / 20 for step in range(120)]),
    )


@pytest.mark.parametrize(("what", "series"), [pytest.param(*each, id=each[0]) for each in disturbed()])
def test_what_healthy_runs_do_now_and_then_fires_nothing(what: str, series: list[Metrics]) -> None:
    assert fired(series) == {}, what


def test_one_step_that_ruins_a_policy_is_seen() -> None:
    assert fired(steps(8, train__ppo_kl=course((1, 4.0), (7, 0.0)))) == {"policy_kl": 5}


def test_entropy_is_compared_with_that_of_the_first_steps_however_long_ago() -> None:
    slowly = steps(100, train__entropy_loss=[0.7 * 0.96**step for step in range(100)])
    assert fired(slowly) == {"entropy_collapse": 62}


def test_groups_that_a_filter_rejects_teach_nothing_either() -> None:
    both = steps(12, rollout__filtered_ratio=[0.8], rollout__zero_std_ratio=[0.8])
    assert fired(both) == {"no_signal": 10}


@pytest.mark.parametrize("other", ["critic", "one sample"])
def test_estimators_that_compare_no_group_need_rewards_that_differ_in_a_step(other: str) -> None:
    """One sample for each prompt has no spread in its group, and a critic needs none."""
    own = {"train/value_loss": 0.1} if other == "critic" else {}
    alike = [{**each, **own} for each in steps(12, rollout__zero_std_ratio=[1.0])]
    if other == "one sample":
        alike = [{name: each[name] for name in each if name != "passrate/pass@2"} for each in alike]
    assert fired(alike) == {}
    assert fired([{**each, "rollout/reward_std": 0.0} for each in alike]) == {"no_signal": 10}


def test_an_sft_run_is_judged_by_what_it_has() -> None:
    names = ("train/loss", "train/grad_norm", "train/entropy_loss", "perf/driver_rss_gib")
    series = [{name: each[name] for name in names} for each in steps(20)]
    assert fired(series) == {}
    assert fired([*series, {**series[0], "train/grad_norm": 90.0}]) == {"gradient_spike": 21}
