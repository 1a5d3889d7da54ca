"""``anygauge.Run``: a run of this or an earlier process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anygauge.api.generation import generate
from anygauge.api.run_view import RunView
from anygauge.api.short_errors import short_errors

__all__ = ["Run"]


class Run(RunView):
    """A run: its metrics, samples, report and model.

    Example::

        run = Run.load("runs/arithmetic-grpo")
        print(run.outcome, run.metrics_list[-1]["rollout/raw_reward"])
        print(run.generate(["37+58="]))

    :param directory: Directory of a run that goes on, has ended or has failed.
    :raises CheckpointError: It is none.
    """

    @classmethod
    def load(cls, directory: str | Path) -> Run:
        """Open the directory of a run, whichever program made it."""
        return cls(directory)

    @short_errors()
    def generate(self, prompts: str | Sequence[Any], **settings: Any) -> list[str]:
        """Return responses of the trained model; see :func:`anygauge.generate`.

        Sampling settings and the chat template are those of the run, unless they are given.

        Example: ``run.generate(["37+58="], temperature=0)``
        """
        return generate(self, prompts, **settings)
