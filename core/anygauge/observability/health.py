"""Health log ``health.jsonl``: a line for each step that broke a rule."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

__all__ = ["HEALTH_FILE", "HealthEvent", "append_event", "read_events"]

HEALTH_FILE = "health.jsonl"
"""Name of the file in the run directory; a run that breaks no rule has none."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthEvent:
    """A number of a step that is beyond a limit.

    Example line::

        {"time": 1767225600.25, "step": 3, "level": "warning", "rule": "logprob_abs_diff", "value": 0.2,
         "limit": 0.15, "text": "Step 3: trainer and rollout engine disagree ..."}
    """

    step: int
    level: Literal["warning", "error"]
    rule: str
    value: float | None
    """``None`` where it is not finite."""
    limit: float
    text: str


def append_event(directory: Path, event: HealthEvent, clock: Callable[[], float] = time.time) -> None:
    """Append an event to a run's file; failures to write only warn."""
    line = json.dumps({"time": clock(), **asdict(event)}, allow_nan=False)
    try:
        with (directory / HEALTH_FILE).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    except OSError as error:
        _log.warning("%s of %s cannot be written: %s", HEALTH_FILE, directory, error)


def read_events(directory: Path) -> tuple[Sequence[HealthEvent], int]:
    """Return the events of a run, and how many lines of its file cannot be read."""
    try:
        lines = (directory / HEALTH_FILE).read_bytes().splitlines()
    except OSError:
        return (), 0
    event, events, broken = TypeAdapter(HealthEvent), list[HealthEvent](), 0
    for line in lines:
        try:
            events.append(event.validate_json(line))
        except ValidationError:
            broken += 1
    return events, broken
