"""State of the training loop, which its steps and the saving of a run share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anygauge.config import Config
from anygauge.data.balance import free
from anygauge.hub import localized
from anygauge.observability.performance import LANGUAGE
from anygauge.run_directory.checkpoints import CheckpointWriter
from anygauge.run_directory.directory import RunDirectory
from anygauge.run_directory.dumps import DIRECTORY, ModelFacts, model_facts
from anygauge.trainer.background_evaluation import BackgroundEvaluation
from anygauge.trainer.replay import ReplayedMedia
from anygauge.trainer.rollout_scheduler import GroupSource
from anygauge.trainer.session import Session
from anygauge_hooks.data import DataSource
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Group, Prompt
from anygauge_hooks.types import RunInfo

__all__ = ["Loop"]


@dataclass(slots=True)
class Loop:
    """State shared by the steps of a run."""

    session: Session
    directory: RunDirectory
    source: DataSource
    flops_per_token: Callable[[int], float]
    """FLOPs per token of the model's forward pass, from the length of a sequence."""
    checkpoints: CheckpointWriter | None
    """``None`` where nothing is saved."""
    next_prompts: Sequence[Prompt] | Exception = ()
    """Conversations that were read ahead of the next step, or the error of the attempt."""
    media_flops: Callable[[Media], float] = free
    """FLOPs of a tower's forward pass over a medium."""
    save_s: float = 0.0
    """Seconds that saving took after the last step; 0 if nothing was saved."""
    rollouts: GroupSource | None = None
    """Groups of each step; ``None`` in a run that trains on conversations or replays batches."""
    replayed_media: ReplayedMedia = field(default_factory=lambda: ReplayedMedia(None))
    background: BackgroundEvaluation | None = None
    """Evaluations that training does not wait for; ``None`` where it does."""
    groups: Sequence[Group] = ()
    """Scored groups of the step, from its rollouts to its end."""
    first_step: int = 1
    """First step of this part of the run."""
    trained: int = 0
    """Step that is being trained, or was last; 0 before the first of this part of the run."""
    is_stopping: bool = False
    """Whether a signal asked the run to end, and a step is to be saved before."""

    @property
    def config(self) -> Config:
        """The run's."""
        return self.session.config

    @property
    def flops(self) -> tuple[Callable[[int], float], Callable[[Media], float], Collection[str]]:
        """Functions that count the operations of a step, and the frozen parts."""
        train = self.config.train
        frozen = (*train.freeze, LANGUAGE) if train.lora.is_on else train.freeze
        return self.flops_per_token, self.media_flops, frozen

    @property
    def info(self) -> RunInfo:
        """The run as it stands."""
        return self.session.info

    @property
    def dumps(self) -> Path:
        """Directory of dumps."""
        return Path(self.info.directory) / DIRECTORY

    @property
    def model(self) -> ModelFacts:
        """Facts about the policy that dumps keep."""
        return model_facts(localized(self.config, data=False).model.path)
