"""State of a run that changes from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anygauge_hooks.types import RunInfo

__all__ = ["RunState"]


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

    def finish_step(self, step: int) -> None:
        """Record that a step is done."""
        self.info = replace(self.info, step=step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        saved = {"step": self.info.step, "version": self.version, "source": dict(self.source)}
        if self.scores:
            saved |= {"best": self.best, "scores": list(self.scores.items())}
        return {**saved, "rollout": dict(self.rollout)} if self.rollout else saved

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to what :meth:`saved` returned."""
        self.finish_step(saved["step"])
        self.version = saved["version"]
        self.source = saved["source"]
        self.rollout = saved.get("rollout", {})
        if saved.get("best") == self.best:  # a resume may change it
            self.scores.update(saved.get("scores", ()))
