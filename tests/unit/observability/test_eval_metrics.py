"""Evaluations by hand, and pass@k against every possible draw."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.observability.metrics import eval_metrics, pass_at_k, pass_counts
from anygauge_hooks.rl import FinishReason, Group, Prompt, Sample
from anygauge_tests.scoring import sample as make_sample


def sample(raw: Any, length: int = 1, finish: FinishReason = "stop", error: str | None = None) -> Sample:
    reward = None if error else 0.125
    return make_sample(length, finish_reason=finish, reward=reward, raw_reward=raw, error=error)


def of(*samples: Sample) -> Group:
    return Group(prompt=Prompt(index=0, tokens=(1,), text="a"), samples=samples)


def test_eval_metrics() -> None:
    groups = [
        of(sample(0.0), sample(1.0), sample(0.0)),
        of(sample(0.0, 3), sample(0.0, 3), sample(0.5, 5, "length")),
    ]
    assert eval_metrics("aime", groups, float) == {
        "eval/aime": 0.25,
        "eval/aime-truncated_ratio": pytest.approx(1 / 6),
        "eval/aime-failed_ratio": 0.0,
        "eval/aime-samples": 6,
        "eval/aime/repetition_frac": 0.0,
        "eval/aime/response_len/mean": pytest.approx(14 / 6),
        "eval/aime/response_len/median": 2.0,
        "eval/aime/response_len/max": 5,
        "eval/aime/response_len/min": 1,
        "passrate/aime-pass@1": pytest.approx(1 / 6),
        "passrate/aime-pass@2": pytest.approx(1 / 3),
        "passrate/aime-pass@3": 0.5,
    }


def test_failed_samples_are_left_out_of_the_score() -> None:
    metrics = eval_metrics("a", [of(sample(1.0), sample(None, error="it hung"))], float)
    assert metrics["eval/a"] == 1.0
    assert metrics["eval/a-failed_ratio"] == 0.5
    assert metrics["passrate/a-pass@1"] == 1.0
    assert "passrate/a-pass@2" not in metrics


def test_without_any_score_there_is_no_mean() -> None:
    metrics = eval_metrics("a", [of(sample(None, error="it hung"))], float)
    assert "eval/a" not in metrics
    assert metrics["eval/a-failed_ratio"] == 1.0


def test_only_the_asked_for_k() -> None:
    metrics = eval_metrics("a", [of(*[sample(1.0)] * 8)], float, ks=(4, 16))
    assert [name for name in metrics if "pass@" in name] == ["passrate/a-pass@4"]


@pytest.mark.parametrize(
    ("raw", "passes"), [(1.0, 1.0), (0.1 + 0.2 + 0.7, 1.0), (2.0, 1.0), (0.99, 0.0), (-1.0, 0.0)]
)
def test_a_full_score_passes(raw: float, passes: float) -> None:
    assert eval_metrics("a", [of(sample(raw))], float)["passrate/a-pass@1"] == passes


def test_powers_of_two_and_the_last() -> None:
    assert pass_counts(6) == [1, 2, 4]
    assert pass_counts(6, last=True) == [1, 2, 4, 6]
    assert pass_counts(8, last=True) == [1, 2, 4, 8]
    assert pass_counts(0) == pass_counts(0, last=True) == []


@st.composite
def draws(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(draws())
def test_pass_at_k_is_the_share_of_all_draws(case: tuple[int, int, int]) -> None:
    n, passed, k = case
    results = [True] * passed + [False] * (n - passed)
    hits = [any(results[i] for i in chosen) for chosen in combinations(range(n), k)]
    assert pass_at_k(n, passed, k) == pytest.approx(float(Fraction(sum(hits), len(hits))), abs=1e-12)


def test_pass_at_k_of_many_samples_stays_a_probability() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(100_000, 99_999, 2) == 1.0
    assert pass_at_k(100_000, 0, 100_000) == 0.0
