"""The rules over the course of a run: when each begins to fire, gets worse, and is over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from anygauge.health.history import History
from anygauge.health.rules import RULES, Limit, Rule, RuleName

__all__ = ["CALM", "Change", "HealthWatch", "Watch", "watch_rules"]

CALM = 5
"""Steps in a row within the limit before a rule that fired is over: a value near its limit warns once."""

Kind = Literal["fires", "worsens", "clears"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A rule that began to fire, got twice as bad since it was last told of, or is over.

    Example: ``Change(step=34, rule="truncation", kind="fires", value=0.62, limit=0.5, text="Step 34: ...")``
    """

    step: int
    rule: RuleName
    kind: Kind
    value: float | None
    """``None`` where it is not finite."""
    limit: float
    text: str
    """Sentences for a person."""


@dataclass(slots=True)
class Watch:
    """One rule with its limit, as the steps of a run go by."""

    rule: Rule
    limit: Limit
    value: float | None = None
    """The last one."""
    worst: float | None = None
    """Worst value of all steps."""
    since: int | None = None
    """Step at which it began to fire; ``None`` while it does not."""
    steps: int = 0
    """Steps so far that were beyond the limit."""
    text: str = ""
    """Last message, while it fires."""
    _told: float = math.nan
    _calm: int = 0

    def see(self, step: int, history: History) -> Change | None:
        """Judge a step, and return what it changes."""
        limit = self.limit.value
        if limit is None or not all(map(history.has, self.rule.metrics)):
            return None
        value = self.rule.measure(history)
        if value is None:
            return None
        self.value, self.worst = value, self._worse(value, self.worst)
        if not self.rule.is_beyond(value, limit):
            return self._keep(step, value, limit)
        self._calm, self.steps = 0, self.steps + 1
        return self._break(step, value, limit)

    def _break(self, step: int, value: float, limit: float) -> Change | None:
        if self.since is not None and not self._is_doubled(value):
            return None
        kind: Kind = "fires" if self.since is None else "worsens"
        self.since = step if self.since is None else self.since
        self._told = value
        self.text = f"Step {step}: {self.limit.broken_by(self.rule, value)} {self.rule.advice}"
        return self._change(step, kind, value, limit, self.text)

    def _keep(self, step: int, value: float, limit: float) -> Change | None:
        if self.since is None:
            return None
        self._calm += 1
        if self._calm < CALM:
            return None
        since, self.since, self._calm, self.text = self.since, None, 0, ""
        text = f"Step {step}: {self.rule.name} is over, which began at step {since}."
        return self._change(step, "clears", value, limit, text)

    def _change(self, step: int, kind: Kind, value: float, limit: float, text: str) -> Change:
        known = value if math.isfinite(value) else None
        return Change(step=step, rule=self.rule.name, kind=kind, value=known, limit=limit, text=text)

    def _is_doubled(self, value: float) -> bool:
        """Return whether a value is at least twice as bad as the one that was last told of."""
        if value == self._told:  # 0 and infinity are twice themselves
            return False
        return value <= self._told / 2 if self.rule.is_floor else value >= 2 * self._told

    def _worse(self, value: float, other: float | None) -> float:
        if other is None or not math.isfinite(value):
            return value
        return min(value, other) if self.rule.is_floor else max(value, other)


@dataclass(slots=True)
class HealthWatch:
    """All rules of a run."""

    watches: list[Watch]
    _history: History = field(init=False)

    def __post_init__(self) -> None:
        rules = [watch.rule for watch in self.watches]
        self._history = History({name for rule in rules for name in (*rule.metrics, *rule.others)})

    def step(self, step: int, metrics: Mapping[str, float | None]) -> list[Change]:
        """Judge the metrics of a step, and return what changes."""
        self._history.add(metrics)
        return list(self._changes(step))

    def _changes(self, step: int) -> Iterator[Change]:
        for watch in self.watches:
            if (change := watch.see(step, self._history)) is not None:
                yield change


def watch_rules(limits: Mapping[RuleName, Limit]) -> HealthWatch:
    """Return a watch over all rules."""
    return HealthWatch([Watch(rule, limits[rule.name]) for rule in RULES])
