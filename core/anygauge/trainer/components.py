"""Components of a run or of an evaluation: which engines it builds."""

from __future__ import annotations

from dataclasses import dataclass

from anygauge.config import Config

__all__ = ["Components", "evaluation_components", "run_components"]


@dataclass(frozen=True, slots=True)
class Components:
    """Components that a run builds."""

    trains: bool
    """A train engine in each worker."""
    generates: bool
    """Rollout engines, in these workers or in processes of their own, and what scores their samples."""
    learns: bool = False
    """The models that training compares the policy with, and the critic."""


def run_components(config: Config) -> Components:
    """Return what a run builds: in a debug mode, one half alone."""
    mode = config.debug.mode
    trains = mode != "rollout_only"
    return Components(trains=trains, generates=mode != "train_only" and config.samples, learns=trains)


def evaluation_components(config: Config, *, loads: bool) -> Components:
    """Return what an evaluation alone builds.

    :param loads: Whether it reads a checkpoint, which only train engines can.
    """
    given = bool(config.rollout.external)  # they have whatever weights they have, until they are sent others
    return Components(trains=loads or given or config.run.task == "sft", generates=config.samples)
