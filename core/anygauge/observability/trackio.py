"""The ``trackio`` tracker: a local database, shown with ``trackio show``."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from typing import Any

from anygauge.config.secret_values import masked
from anygauge.observability.metrics import with_step_axes
from anygauge_hooks.types import RunInfo

__all__ = ["TrackioTracker", "make_trackio_tracker"]

logger = logging.getLogger(__name__)

PROJECT = "anygauge"


class TrackioTracker:
    """Gives each call's metrics to a run of trackio.

    :param run: From ``trackio.init``.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics at a step, and the steps of their groups beside them."""
        if metrics:
            self._run.log(with_step_axes(metrics, step), step=step)

    def close(self) -> None:
        """Flush and finish the run."""
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # and not the run's own, which leaves it to be finished again at exit


def make_trackio_tracker(run: RunInfo) -> TrackioTracker:
    """Return the tracker of a run, with ``trackio.init``'s arguments among its options."""
    import trackio

    options: dict[str, Any] = {"project": PROJECT, "name": run.name}
    options |= run.config.run.tracker_options.get("trackio", {})
    # It prints how to show the run, which belongs into the log.
    with contextlib.redirect_stdout(io.StringIO()):
        started = trackio.init(
            **options,
            config=masked(run.config.model_dump(mode="json")),
            resume="allow" if run.step else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
    logger.info("trackio records this run: trackio show --project %s", options["project"])
    return TrackioTracker(started)
