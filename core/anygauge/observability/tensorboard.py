"""The ``tensorboard`` tracker: event files in the run directory, for ``tensorboard --logdir``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anygauge.observability.metrics import with_step_axes
from anygauge_hooks.types import RunInfo

__all__ = ["TensorboardTracker", "make_tensorboard_tracker"]

FOLDER = "tensorboard"
"""In the run directory."""
FLUSH_S = 10
"""Longest time for which a point is in memory alone."""


class TensorboardTracker:
    """Writes one event per call and group, which takes a tenth of the time of one per metric.

    :param folder: Folder of the event files; made if need be.
    :param step: Steps finished so far. What the folder has of later ones, from before a resume, is
        hidden; at 0, all that it has.
    """

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        goes_on = any(folder.glob("*tfevents*"))
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        if goes_on:
            # Step 0 has the evaluation before training, which a run from its beginning takes again.
            start, first = SessionLog(status=SessionLog.START), step + 1 if step else 0
            self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=start))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics, each at the step of its group."""
        for at, values in _by_group(metrics, step):
            summary = {"value": [{"tag": tag, "simple_value": float(each)} for tag, each in values.items()]}
            self._writer.add_event(self._event(wall_time=time.time(), step=at, summary=summary))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def make_tensorboard_tracker(run: RunInfo) -> TensorboardTracker:
    """Return the tracker of a run, with ``dir`` among its options."""
    options: Mapping[str, Any] = run.config.run.tracker_options.get("tensorboard", {})
    return TensorboardTracker(Path(options.get("dir", Path(run.directory) / FOLDER)), run.step)


def _by_group(metrics: Mapping[str, float], step: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the step of each group and its metrics without it: the axis is no curve."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in with_step_axes(metrics, step).items():
        group, _, rest = name.partition("/")
        groups[group][rest] = value
    for group, values in groups.items():
        yield int(values.pop("step")), {f"{group}/{rest}": value for rest, value in values.items()}
