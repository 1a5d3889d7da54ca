"""Requests of a fleet whose engines are struck in many ways; ``bench/faults.py`` strikes 200 times."""

from __future__ import annotations

import pytest

from anygauge_tests.chaos import Outcome, run_chaos


def check(outcome: Outcome, strikes: int) -> None:
    assert outcome.problems == []
    assert sum(outcome.strikes.values()) == strikes
    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert outcome.restarts


def test_a_short_storm() -> None:
    check(run_chaos(7, 5, engines=3, under_way=6), 5)


@pytest.mark.soak
def test_a_long_storm() -> None:
    outcome = run_chaos(0, 200)
    check(outcome, 200)
    assert outcome.mixed
    assert outcome.seconds < 180
