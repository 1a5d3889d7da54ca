"""The ``jsonl`` tracker: one JSON object per line in the run directory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from anygauge.observability.metrics import with_step_axes
from anygauge_hooks.types import RunInfo

__all__ = ["METRICS_FILE", "JsonlTracker", "make_jsonl_tracker"]

METRICS_FILE = "metrics.jsonl"
"""Name of the file in the run directory."""


class JsonlTracker:
    """Appends each call's metrics as a line, with the step of each of their groups.

    A line is on its way to the disk when :meth:`log` returns. A value that is not finite is written as
    ``null``, which JSON has, and not as ``NaN``, which it has not.

    Example line::

        {"train/step": 3, "train/loss": 0.25, "train/grad_norm": null}
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line; nothing for no metrics."""
        if metrics:
            row = {name: _json_value(value) for name, value in with_step_axes(metrics, step).items()}
            self._stream.write(json.dumps(row, allow_nan=False) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def make_jsonl_tracker(run: RunInfo) -> JsonlTracker:
    """Return the tracker of a run; the file of an earlier part of it is continued."""
    return JsonlTracker(Path(run.directory) / METRICS_FILE)


def _json_value(value: float) -> float | None:
    if isinstance(value, int):
        return value
    # Numbers of array libraries become plain ones here.
    number = float(value)
    return number if math.isfinite(number) else None
