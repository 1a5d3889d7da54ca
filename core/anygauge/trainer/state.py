"""State of a run that changes from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anygauge.observability.reward_parts import PartNames
from anygauge_hooks.types import RunInfo

__all__ = ["TRAINING", "RunState"]

TRAINING = ""
"""Key of the training data, which no evaluation data set has for its name."""


@dataclass(slots=True)
class RunState:
    """How far a run has come."""

    info: RunInfo
    """With the number of finished steps; what observers get."""
    version: int = 0
    """Version of the weights in the rollout engines."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """State of the data source after drawing exactly the prompts of the finished steps."""
    rollout: Mapping[str, Any] = field(default_factory=dict)
    """State of the rollout scheduler at that step; empty without one."""
    best: str | None = None
    """Metric of ``save.best``."""
    scores: dict[int, float] = field(default_factory=dict)
    """Value of that metric by step."""
    is_evaluated: bool = True
    """Whether the evaluation that is due after the last step, if one is, was made or started."""
    part_names: Mapping[str, PartNames] = field(default_factory=lambda: {TRAINING: PartNames()})
    """Metric names of the parts of rewards, of :data:`TRAINING` and of each evaluation data set."""

    def finish_step(self, step: int) -> None:
        """Record that a step is done."""
        self.info = replace(self.info, step=step)
        self.is_evaluated = False

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        saved = {"step": self.info.step, "version": self.version, "source": dict(self.source)}
        if not self.is_evaluated:
            saved["is_evaluated"] = False
        if self.scores:
            saved |= {"best": self.best, "scores": list(self.scores.items())}
        if names := {key: state for key, part in self.part_names.items() if (state := part.state())}:
            saved["part_names"] = names
        return {**saved, "rollout": dict(self.rollout)} if self.rollout else saved

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to what :meth:`saved` returned."""
        self.finish_step(saved["step"])
        self.is_evaluated = saved.get("is_evaluated", True)
        self.version = saved["version"]
        self.source = saved["source"]
        self.rollout = saved.get("rollout", {})
        if saved.get("best") == self.best:  # a resume may change it
            self.scores.update(saved.get("scores", ()))
        for name, names in saved.get("part_names", {}).items():
            if name in self.part_names:  # a resume may evaluate on other data
                self.part_names[name].restore(names)
