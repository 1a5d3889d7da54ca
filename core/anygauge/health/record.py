"""``health.json``: the health of a run, as its directory has it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from anygauge.disk import replace_file
from anygauge.health.rules import RuleName, Unit
from anygauge.health.watch import Change, HealthWatch, Watch

__all__ = ["HEALTH_FILE", "Health", "RuleHealth", "health_of", "read_health", "write_health"]

HEALTH_FILE = "health.json"
"""Name of the file in the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleHealth:
    """One rule after a step."""

    rule: RuleName
    state: Literal["ok", "firing", "no data", "off"]
    """``no data`` if no step so far had what the rule needs."""
    unit: Unit
    value: float | None
    """The last one; ``None`` where it is not finite, and without data."""
    limit: float | None
    worst: float | None
    """Worst value of all steps."""
    steps: int
    """Steps so far that were beyond the limit."""
    since: int | None
    """Step at which the rule began to fire."""
    text: str
    """Message of a rule that fires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Health of a run.

    Example: ``[rule.rule for rule in health.firing] == ["truncation"]``
    """

    step: int
    """Step that was judged last."""
    status: Literal["ok", "warning", "stopped"]
    """``warning`` while a rule fires; ``stopped`` if one has ended the run."""
    stopped_by: RuleName | None
    rules: tuple[RuleHealth, ...]
    """All of them, those that matter most first."""
    changes: tuple[Change, ...]
    """Rules that began to fire, got twice as bad, or were over, ascending by step."""

    @property
    def firing(self) -> tuple[RuleHealth, ...]:
        """Rules that fire."""
        return tuple(rule for rule in self.rules if rule.state == "firing")


def health_of(
    watch: HealthWatch, step: int, changes: Sequence[Change], stopped_by: RuleName | None = None
) -> Health:
    """Return the health of a run after a step.

    :param stopped_by: The rule that ends the run there.
    """
    rules = tuple(map(_rule_health, watch.watches))
    is_bad = any(rule.state == "firing" for rule in rules)
    status: Literal["ok", "warning", "stopped"] = "warning" if is_bad else "ok"
    return Health(
        step=step,
        status="stopped" if stopped_by else status,
        stopped_by=stopped_by,
        rules=rules,
        changes=tuple(changes),
    )


def _rule_health(watch: Watch) -> RuleHealth:
    state: Literal["ok", "firing", "no data", "off"] = "ok"
    if watch.limit.value is None:
        state = "off"
    elif watch.since is not None:
        state = "firing"
    elif watch.value is None:
        state = "no data"
    return RuleHealth(
        rule=watch.rule.name,
        state=state,
        unit=watch.rule.unit,
        value=_finite(watch.value),
        limit=watch.limit.value,
        worst=_finite(watch.worst),
        steps=watch.steps,
        since=watch.since,
        text=watch.text,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def write_health(directory: Path, health: Health) -> None:
    """Write the file in one piece: a reader sees the health of one step or of the next.

    :raises OSError: It cannot be written.
    """
    replace_file(directory / HEALTH_FILE, json.dumps(asdict(health), indent=1, allow_nan=False) + "\n")


def read_health(directory: Path) -> Health | None:
    """Return the health of a run, or ``None`` if its directory has no such file.

    :raises ValueError: The file is not one that :func:`write_health` wrote.
    :raises OSError: It cannot be read.
    """
    from pydantic import TypeAdapter

    try:
        content = (directory / HEALTH_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return TypeAdapter(Health).validate_json(content)
