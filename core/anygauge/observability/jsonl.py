"""The ``jsonl`` tracker: one JSON object per line in the run directory."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from anygauge.observability.metrics import with_step_axes
from anygauge_hooks.types import RunInfo

__all__ = ["METRICS_FILE", "JsonlTracker", "make_jsonl_tracker"]

METRICS_FILE = "metrics.jsonl"
"""Name of the file in the run directory."""


class JsonlTracker:
    """Appends each call's metrics as a line, with the step of each of their groups and the time.

    A line is on its way to the disk when :meth:`log` returns. A value that is not finite is written as
    ``null``, which JSON has, and not as ``NaN``, which it has not.

    Example line::

        {"time": 1767225600.25, "train/step": 3, "train/loss": 0.25, "train/grad_norm": null}

    :param path: Path of a file that is made, or continued.
    :param clock: Seconds since 1970, as ``time.time``.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._stream = path.open("a", encoding="utf-8")
        if _breaks_off(path):
            self._stream.write("\n")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line; nothing for no metrics."""
        if metrics:
            row = {name: _json_value(value) for name, value in with_step_axes(metrics, step).items()}
            self._stream.write(json.dumps({"time": self._clock(), **row}, allow_nan=False) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def make_jsonl_tracker(run: RunInfo) -> JsonlTracker:
    """Return the tracker of a run; the file of an earlier part of it is continued."""
    return JsonlTracker(Path(run.directory) / METRICS_FILE)


def _breaks_off(path: Path) -> bool:
    """Return whether the last line has no end: a kill came in between, or the disk was full."""
    with path.open("rb") as stream:
        if not stream.seek(0, os.SEEK_END):
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read() != b"\n"


def _json_value(value: float) -> float | None:
    if isinstance(value, int):
        return value
    # Numbers of array libraries become plain ones here.
    number = float(value)
    return number if math.isfinite(number) else None
