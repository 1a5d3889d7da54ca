"""Session: the running processes of a run or of an evaluation, and the operations of both."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anygauge.config import Config
from anygauge.config.roles import Components
from anygauge.distributed.layout import Layout, layout_of
from anygauge.observability.performance import WorkerReport
from anygauge.observability.phases import PhaseTime, Row, take_phases
from anygauge.observability.timeline import Timeline
from anygauge.plugins import Plugins
from anygauge.rollout.rewards import Scorer
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.serving.colocation import ColocationScheduler
from anygauge.serving.engines import Engines
from anygauge.trainer.generation import SampleMaker
from anygauge.trainer.state import RunState
from anygauge_hooks.types import RunInfo, Tracker

if TYPE_CHECKING:
    from anygauge.data.media.loader import MediaLoader
    from anygauge.trainer.inputs import EvalSet

__all__ = ["Session"]

_log = logging.getLogger(__name__)
EVALUATIONS = "eval/"
"""Begins the names of an evaluation's metrics."""


@dataclass(slots=True)
class Session:
    """Running processes of a run, and the settings that an evaluation needs."""

    config: Config
    plugins: Plugins
    components: Components
    workers: WorkerGroup
    """Training workers, if there are any."""
    engines: Engines
    eval_sets: Sequence[EvalSet]
    scorers: Mapping[str, Scorer]
    """Scorers by data set; :data:`anygauge.trainer.state.TRAINING` is the training samples' scorer."""
    state: RunState
    colocation: ColocationScheduler
    """Scheduler of trainers and engines on the same devices."""
    maker: SampleMaker | None = None
    """Maker of samples; ``None`` where nothing is generated."""
    forbidden: tuple[int, ...] = ()
    """Tokens that are never drawn: those that hold the places of media."""
    media: MediaLoader | None = None
    """Decodes what prompts show; ``None`` for a run of text."""
    trackers: Sequence[Tracker] = ()
    timeline: Timeline | None = None
    """``None`` in an evaluation, and with ``profile.timeline = false``."""
    has_told_of_best: bool = False
    """Whether the user was warned that no metric is that of ``save.best``."""

    @property
    def info(self) -> RunInfo:
        """The run as it stands."""
        return self.state.info

    @property
    def layout(self) -> Layout:
        """How the workers that train divide the model and the samples."""
        return layout_of(self.config)

    def reports(self) -> list[WorkerReport]:
        """Return and reset the reports of all processes; what they did goes into the timeline."""
        reports = [*self.workers.call("report"), *self.engines.reports()]
        for report in reports:
            for row, phases in report.get("phases", {}).items():
                self.add_phases(row, phases)
        return reports

    def add_phases(self, row: Row, phases: Sequence[PhaseTime]) -> None:
        """Put what a process did into the timeline, if there is one."""
        if self.timeline is not None:
            self.timeline.add(row, phases)

    @contextmanager
    def timed_to_the_end(self) -> Iterator[None]:
        """Put what the driver does in the block into the timeline, also if it raises."""
        try:
            yield
        finally:
            self.add_phases(Row("driver"), take_phases())

    def track(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Give metrics of a step to every tracker, and note that of ``save.best``."""
        best = self.config.save.best
        if best is not None and math.isfinite(metrics.get(best, math.nan)):
            self.state.scores[step] = metrics[best]
        elif best is not None and not self.state.scores:
            self._tell_of_missing(best, metrics, step)
        for tracker in self.trackers:
            tracker.log(metrics, step=step)

    def _tell_of_missing(self, best: str, metrics: Mapping[str, float], step: int) -> None:
        """Warn once of a ``save.best`` that no metric of its kind has: nothing would be kept for it.

        Evaluations have metrics of their own; those of a step say nothing about them.
        """
        is_of_evaluation = any(name.startswith(EVALUATIONS) for name in metrics)  # passrate/ may be, too
        if self.has_told_of_best or best in metrics or best.startswith(EVALUATIONS) != is_of_evaluation:
            return
        self.has_told_of_best = True
        last = best.rpartition("/")[2]
        same = [name for name in metrics if name.rpartition("/")[2] == last]
        close = same or difflib.get_close_matches(best, metrics, n=3, cutoff=0.5)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        _log.warning("save.best = %r is not among the metrics of step %d%s", best, step, meant)
