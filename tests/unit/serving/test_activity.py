"""Phases of a server, from its state and its requests."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.serving import activity as activity_module
from anygauge.serving.activity import Activity


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return 1000.0 + self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock: Any = Clock()
    monkeypatch.setattr(activity_module, "time", clock)
    return clock  # type: ignore[no-any-return]


def test_phases_follow_from_state_and_requests(clock: Clock) -> None:
    activity = Activity()
    activity.set_state("paused")
    clock.now = 1.0
    activity.set_state("serving")
    clock.now = 2.0
    activity.add(1)
    clock.now = 3.0
    with activity.request():  # the second of two
        clock.now = 4.0
    clock.now = 5.0
    activity.add(-1)
    clock.now = 6.0
    activity.set_state("asleep")
    with activity.request():  # one that is about to be refused
        clock.now = 7.0
    activity.set_state("dead")
    clock.now = 9.0
    activity.set_state("unusable")
    clock.now = 10.0
    assert activity.take() == [
        *[("paused", 1000.0, 1.0), ("generate", 1002.0, 3.0), ("asleep", 1006.0, 1.0)],
        ("lost", 1007.0, 3.0),
    ]


def test_a_phase_that_goes_on_is_told_in_parts(clock: Clock) -> None:
    activity = Activity()
    assert activity.take() == []
    activity.add(1)
    clock.now = 2.0
    assert activity.take() == [("generate", 1000.0, 2.0)]
    clock.now = 5.0
    activity.add(-1)
    clock.now = 6.0
    assert activity.take() == [("generate", 1002.0, 3.0)]
    assert activity.take() == []
