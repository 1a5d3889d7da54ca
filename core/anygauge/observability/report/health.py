"""Health box of a report: the verdict, what fires, what was over, and every rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anygauge.health.record import Health, RuleHealth
from anygauge.health.rules import format_value

__all__ = ["HealthBox", "health_box"]

NOTHING = "\N{EN DASH}"


@dataclass(frozen=True, slots=True)
class HealthBox:
    """The box at the top of a page."""

    kind: str
    """``ok``, ``warning`` or ``stopped``."""
    verdict: str
    messages: Sequence[str]
    """Messages of the rules that fire."""
    over: Sequence[str]
    """A sentence for each time that a rule fired and was over."""
    rows: Sequence[Sequence[str]]
    """Rule, state, last value, limit, worst value and number of steps beyond the limit."""


def health_box(health: Health | None) -> HealthBox | None:
    """Return the box of a run; none for a run whose health is not recorded."""
    if health is None:
        return None
    messages = [rule.text for rule in health.firing]
    rows = [_row(rule) for rule in sorted(health.rules, key=lambda rule: rule.state != "firing")]
    return HealthBox(health.status, _verdict(health), messages, list(_over(health)), rows)


def _verdict(health: Health) -> str:
    judged = sum(rule.state in ("ok", "firing") for rule in health.rules)
    where = f"after step {health.step}"
    if health.stopped_by:
        return f"Stopped by the rule {health.stopped_by} {where}."
    if not health.firing:
        return f"No warning {where}: {judged} of {len(health.rules)} rules had data, and none fires."
    names = ", ".join(rule.rule for rule in health.firing)
    count = len(health.firing)
    return f"{count} of {judged} rules fire{'s' if count == 1 else ''} {where}: {names}."


def _over(health: Health) -> Iterator[str]:
    began: dict[str, int] = {}
    for change in health.changes:
        if change.kind == "fires":
            began[change.rule] = change.step
        if change.kind == "clears" and change.rule in began:
            yield f"{change.rule} fired at step {began.pop(change.rule)} and was over at step {change.step}."


def _row(rule: RuleHealth) -> list[str]:
    numbers = [
        NOTHING if value is None else format_value(value, rule.unit)
        for value in (rule.value, rule.limit, rule.worst)
    ]
    state = f"fires since step {rule.since}" if rule.state == "firing" else rule.state
    return [rule.rule, state, *numbers, str(rule.steps)]
