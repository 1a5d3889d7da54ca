"""Trackers of a run, and the handling of one that fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge_hooks.types import RunInfo, Tracker

__all__ = ["GuardedTracker", "open_tracker", "tracker_names"]

logger = logging.getLogger(__name__)

ALWAYS = "jsonl"
"""The report, the tests of a run and ``--resume`` read its file."""


def tracker_names(config: Config) -> tuple[str, ...]:
    """Return the names of a run's trackers, each once."""
    return tuple(dict.fromkeys((ALWAYS, *config.run.trackers)))


def open_tracker(name: str, plugins: Plugins, run: RunInfo) -> GuardedTracker:
    """Return a tracker that does not end a run.

    :raises UnknownNameError: No plugin provides it.
    """
    return GuardedTracker(name, plugins.get("register_trackers", name).make(run))


class GuardedTracker:
    """A tracker whose failures only warn, once: they must not end the run.

    It goes on to be called, since a network or a disk may come back.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._tracker = tracker
        self._lost = 0

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics if the tracker can."""
        try:
            self._tracker.log(metrics, step=step)
        except Exception as error:  # noqa: BLE001 - foreign code: a tracker, its network and its disk
            self._lost += 1
            if self._lost == 1:
                logger.warning(
                    "Tracker %r failed at step %d, and the run goes on without what it lost: %r",
                    self.name,
                    step,
                    error,
                )

    def close(self) -> None:
        """Close the tracker, and say how much it lost."""
        try:
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - foreign code: a tracker; what the run made is on disk by now
            logger.warning("Tracker %r failed to close: %r", self.name, error)
        if self._lost:
            logger.warning("Tracker %r lost %d records of this run.", self.name, self._lost)
