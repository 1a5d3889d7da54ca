"""The config tree. Each field's string is its documentation; an unknown key is an error.

The same tree serves every backend: what differs goes into the tables ``[on.cpu]``, ``[on.cuda]`` and
``[on.npu]`` of the file, which :mod:`anygauge.config.load` lays over it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, ValidationError

from anygauge.config.schema.data import Data, DataFile
from anygauge.config.schema.evaluation import Eval, EvalDataset
from anygauge.config.schema.media import Media
from anygauge.config.schema.models import Critic, Model, Parallel, Reference, Teacher
from anygauge.config.schema.placement import Cluster, Placement
from anygauge.config.schema.reward import Reward, RewardFunction, RewardPart
from anygauge.config.schema.rollout import (
    POLICY,
    Rollout,
    RolloutClient,
    RolloutGateway,
    RolloutGroup,
    WeightSync,
)
from anygauge.config.schema.run import Debug, Health, Hub, Profile, Run, Save
from anygauge.config.schema.section import DType, Section, path_alone
from anygauge.config.schema.training import Algorithm, Lora, Train

__all__ = [
    "POLICY",
    "Algorithm",
    "Cluster",
    "Config",
    "Critic",
    "DType",
    "Data",
    "DataFile",
    "Debug",
    "Eval",
    "EvalDataset",
    "Health",
    "Hub",
    "Lora",
    "Media",
    "Model",
    "Parallel",
    "Placement",
    "Profile",
    "Reference",
    "Reward",
    "RewardFunction",
    "RewardPart",
    "Rollout",
    "RolloutClient",
    "RolloutGateway",
    "RolloutGroup",
    "Run",
    "Save",
    "Section",
    "Teacher",
    "Train",
    "WeightSync",
]


class Config(Section):
    """A run, for any backend."""

    explain: ClassVar[Callable[[ValidationError], Exception]]
    """Returns the error that names every problem; :mod:`anygauge.config.load` sets it."""
    as_written: ClassVar[Callable[[Mapping[str, Any]], dict[str, Any]]]
    """Reads ``"none"`` and short names of dtypes, as in a file; :mod:`anygauge.config.load` sets it."""

    run: Run
    model: Annotated[Model, BeforeValidator(path_alone, json_schema_input_type=Model | str)]
    data: Data
    media: Media = Media()
    reward: Reward = Reward()
    hub: Hub = Hub()
    reference: Reference = Reference()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    train: Train = Train()
    teacher: Teacher = Teacher()
    critic: Critic = Critic()
    eval: Eval = Eval()
    health: Health = Health()
    save: Save = Save()
    debug: Debug = Debug()
    profile: Profile = Profile()
    placement: Placement = Placement()
    cluster: Cluster = Cluster()
    weight_sync: WeightSync = WeightSync()

    if not TYPE_CHECKING:  # where the tables are the arguments

        def __init__(self, **tables: Any) -> None:
            try:
                super().__init__(**Config.as_written(tables))
            except ValidationError as error:
                raise Config.explain(error) from None

        # Without it pydantic would validate trees and JSON through this function, and never strictly. It is
        # undocumented: docs/seams.md.
        __init__.__pydantic_base_init__ = True

    @property
    def has_engines_apart(self) -> bool:
        """Whether rollout engines run outside the training workers."""
        return self.placement.rollout_workers > 0 or bool(self.rollout.external)

    @property
    def pushes_adapter(self) -> bool:
        """Whether servers get the trained adapter by itself, and compute it beside ``model.path``."""
        return self.weight_sync.transport == "adapter" and self.train.lora.is_on

    @property
    def starts_elsewhere(self) -> bool:
        """Whether engines that have loaded ``model.path`` lack something of the first weights."""
        lora = self.train.lora
        return lora.path is not None or lora.base is not None or self.pushes_adapter

    @property
    def rollout_samples(self) -> int:
        """Samples of one rollout; in SFT, rows of one step."""
        per_prompt = 1 if self.run.task == "sft" else self.rollout.samples_per_prompt
        return self.rollout.prompts_per_step * per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps for each rollout, from ``train.global_batch_size`` if it is set."""
        size = self.train.global_batch_size
        return self.train.optimizer_steps if size is None else max(1, self.rollout_samples // size)

    @property
    def samples(self) -> bool:
        """Whether the run generates: for RL training, or for an evaluation with a reward."""
        rewards = [self.reward, *(each.reward for each in self.eval.datasets.values() if each.reward)]
        is_scored = any(reward.function or reward.parts for reward in rewards)
        return self.run.task != "sft" or (is_scored and bool(self.eval.data or self.eval.datasets))
