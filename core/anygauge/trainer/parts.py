"""Which engines a run builds, or an evaluation alone."""

from __future__ import annotations

from dataclasses import dataclass

from anygauge.config import Config

__all__ = ["Parts", "evaluation_parts", "run_parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What is built."""

    trains: bool
    """A train engine in each worker."""
    generates: bool
    """Rollout engines, in these workers or in processes of their own, and what scores their samples."""
    learns: bool = False
    """The models that training compares the policy with, and the critic."""


def run_parts(config: Config) -> Parts:
    """Return what a run builds: in a debug mode, one half alone."""
    mode = config.debug.mode
    trains = mode != "rollout_only"
    return Parts(trains=trains, generates=mode != "train_only" and config.samples, learns=trains)


def evaluation_parts(config: Config, *, loads: bool) -> Parts:
    """Return what an evaluation alone builds.

    :param loads: Whether it reads a checkpoint, which only train engines can.
    """
    given = bool(config.rollout.external)  # they have whatever weights they have, until they are sent others
    return Parts(trains=loads or given or config.run.task == "sft", generates=config.samples)
