"""A bound on the age of samples that no order of completion breaks."""

from __future__ import annotations

import random
from operator import itemgetter

from hypothesis import given, settings
from hypothesis import strategies as st

from anygauge.rollout.staleness import Owed, Staleness, choose, is_met


def test_a_step_at_a_time_is_a_bound_of_none() -> None:
    bound = Staleness(max_versions=0, groups_per_step=4)
    assert bound.may_start(untaken=3, version=2, next_version=2)
    assert not bound.may_start(untaken=4, version=2, next_version=2)
    assert not bound.may_start(untaken=0, version=2, next_version=3)  # while version 2 is being trained
    assert bound.owed([2, 2, 2], next_version=2) == [Owed(started_at=2, groups=3)]


def test_one_step_off() -> None:
    bound = Staleness(max_versions=1, groups_per_step=4)
    assert bound.may_start(untaken=3, version=2, next_version=3)
    assert not bound.may_start(untaken=4, version=2, next_version=3)


def test_old_groups_are_owed_before_they_are_too_many() -> None:
    bound = Staleness(max_versions=2, groups_per_step=2)
    assert bound.owed([0, 0, 0, 0, 1, 1], next_version=1) == [Owed(0, 2), Owed(1, 2)]
    assert bound.owed([0, 0, 0, 0], next_version=0) == []
    assert bound.owed([0, 3], next_version=5) == [Owed(0, 1), Owed(3, 2)]


def test_what_is_owed_goes_first_and_then_what_was_done_first() -> None:
    done = [("new", 3), ("newer", 4), ("old", 1), ("older", 0)]
    owed = [Owed(0, 1), Owed(1, 2)]
    assert is_met(owed, [3, 4, 1, 0])
    assert not is_met(owed, [3, 4, 0])
    assert choose(done, 3, owed, itemgetter(1)) == [("new", 3), ("old", 1), ("older", 0)]


@given(
    max_versions=st.integers(0, 4),
    per_step=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_no_order_of_completion_breaks_the_bound_or_stops_the_run(
    max_versions: int, per_step: int, seed: int
) -> None:
    """Training goes on in turns with starts and ends of groups in any order, some of them rejected."""
    chance, bound = random.Random(seed), Staleness(max_versions, per_step)
    version = next_version = 0
    open_: list[int] = []
    done: list[int] = []
    steps = 0
    for _ in range(200):
        event = chance.choice(("start", "end", "reject", "train"))
        untaken = len(open_) + len(done)
        if event == "start" and bound.may_start(untaken, version, next_version):
            open_.append(version)
        elif event == "end" and open_:
            done.append(open_.pop(chance.randrange(len(open_))))
        elif event == "reject" and open_:
            open_.pop(chance.randrange(len(open_)))
        elif event == "train" and next_version > version:
            version = next_version
        elif event == "train":
            owed = bound.owed([*open_, *done], next_version)
            if len(done) >= per_step and is_met(owed, done):
                taken = choose(done, per_step, owed, int)
                assert all(next_version - age <= max_versions for age in taken)
                for age in taken:
                    done.remove(age)
                next_version, steps = version + 1, steps + 1
        assert all(next_version - age <= max_versions for age in [*open_, *done])
    # Whatever happened, all that is open can end, and then a step can be taken.
    version = next_version
    while bound.may_start(len(open_) + len(done), version, next_version):
        open_.append(version)
    done += open_
    assert len(done) >= per_step
    assert is_met(bound.owed(done, next_version), done)
    assert sum(each.groups for each in bound.owed(done, next_version)[-1:]) <= per_step
