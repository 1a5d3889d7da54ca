"""Replays of dumps: the groups of another run, and the media that they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.run_directory.dumps import ModelFacts, read_groups, restore_media, rollout_path
from anygauge.trainer.state import RunState
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Group

if TYPE_CHECKING:
    from anygauge.data.media.loader import MediaLoader

__all__ = ["ReplayedMedia", "ReplayedRollouts", "shown_in"]


def shown_in(groups: Sequence[Group]) -> list[Media]:
    """Return the media of all samples."""
    return [each for group in groups for sample in group.samples for each in sample.media]


class ReplayedMedia:
    """Media of the samples in a step's dumps, kept in the run's store for that step.

    :param loader: ``None`` in a run of text.
    """

    def __init__(self, loader: MediaLoader | None) -> None:
        self._loader = loader
        self._restored: frozenset[str] = frozenset()

    def restore(self, dumps: Path, media: Sequence[Media]) -> None:
        """Put what samples show into the place of what those of the step before showed."""
        if self._loader is None:
            return
        wanted = frozenset(each.key for each in media)
        self._loader.store.drop(self._restored - wanted)
        restore_media(dumps, media, self._loader.store)
        self._restored = wanted


class ReplayedRollouts:
    """The groups that another run dumped, step by step.

    :param model: Facts about the policy, which must be those of the other run.
    """

    def __init__(self, dumps: Path, model: ModelFacts, media: ReplayedMedia) -> None:
        self._dumps = dumps
        self._model = model
        self._media = media

    def collect(self, step: int) -> tuple[list[Group], float]:
        """Return the groups of a step; none is scored again."""
        groups = read_groups(rollout_path(self._dumps, step), self._model)
        self._media.restore(self._dumps, shown_in(groups))
        return groups, 0.0

    def read_ahead(self, state: RunState, *, goes_on: bool) -> None:
        """Do nothing: a replay has no place in the data."""

    def before_sync(self) -> None:
        """Do nothing: nothing is under way."""

    def advance(self, version: int) -> None:
        """Do nothing: what was dumped stays what it was."""

    def stop(self) -> None:
        """Do nothing: nothing is waited for."""

    def metrics(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}
