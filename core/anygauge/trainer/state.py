"""What changes while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from anygauge_hooks.types import RunInfo

__all__ = ["RunState"]


@dataclass(slots=True)
class RunState:
    """How far a run has come."""

    info: RunInfo
    """With the number of finished steps; what observers get."""
    version: int = 0
    """Of the weights in the rollout engines."""

    def finish_step(self, step: int) -> None:
        """Record that a step is done."""
        self.info = replace(self.info, step=step)
