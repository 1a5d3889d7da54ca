"""Staleness limit: the most versions between the weights that sample and those that train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["Owed", "Staleness", "choose", "is_met"]

T = TypeVar("T")


class Owed(NamedTuple):
    """How many groups of a certain age the next step has to train on."""

    started_at: int
    """The age: those that were started at this version or before."""
    groups: int


class Staleness(NamedTuple):
    """A bound in weight versions, and what follows from it for groups that are under way.

    A group is trained on at most ``max_versions`` versions after the one that served when it was started. Two
    rules keep that exactly: so few groups are under way that each has a place in a step within the bound
    (:meth:`may_start`), and a step waits for old groups where the steps after it could not take them all in
    time (:meth:`owed`).
    """

    max_versions: int
    groups_per_step: int

    def may_start(self, untaken: int, version: int, next_version: int) -> bool:
        """Return whether one more group may start.

        :param untaken: Groups that are under way, or done and not handed out.
        :param version: Version that the engines serve.
        :param next_version: Version of the weights that the next step trains.
        """
        return next_version + untaken // self.groups_per_step - version <= self.max_versions

    def owed(self, started_at: Iterable[int], next_version: int) -> list[Owed]:
        """Return what the next step has to train on so that no later one has too much, oldest first.

        :param started_at: The version that served when each untaken group was started.
        """
        owed: list[Owed] = []
        ages = sorted(started_at)
        for count, age in enumerate(ages, 1):
            if ages[count : count + 1] == [age]:
                continue  # the last one of its age counts them all
            later = max(0, age + self.max_versions - next_version)
            if count > later * self.groups_per_step:
                owed.append(Owed(age, count - later * self.groups_per_step))
        return owed


def is_met(owed: Iterable[Owed], started_at: Sequence[int]) -> bool:
    """Return whether there are as many groups of each age as are owed.

    :param started_at: Version at the start of each group that is done.
    """
    return all(sum(age <= each.started_at for age in started_at) >= each.groups for each in owed)


def choose(done: Sequence[T], count: int, owed: Iterable[Owed], started_at: Callable[[T], int]) -> list[T]:
    """Return the groups of a step: what is owed, and else those that were done first.

    :param done: In the order in which they were.
    """
    chosen: list[int] = []
    for each in owed:
        old = [number for number, item in enumerate(done) if started_at(item) <= each.started_at]
        missing = each.groups - sum(number in chosen for number in old)
        chosen += [number for number in old if number not in chosen][: max(0, missing)]
    chosen += [number for number in range(len(done)) if number not in chosen]
    return [done[number] for number in sorted(chosen[:count])]
