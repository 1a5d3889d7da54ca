"""Teacher for distillation; it borrows the policy's memory where both have the same architecture."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config import Config
from anygauge.config.families import family
from anygauge.config.modalities import modalities
from anygauge.config.roles import teacher_config
from anygauge.config.rules.algorithm import has_teacher, rates_samples
from anygauge.config.same_model import differing_keys
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import TrainEngine, TrainEngineSpec, WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.models import ModelSpec, text_config

if TYPE_CHECKING:
    from anygauge_hooks.media import MediaKind
    from anygauge_hooks.types import LoadedPlugins

__all__ = ["Teacher", "make_teacher", "maker"]

TEACHER = "teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """Teacher model and the outputs that training needs of it."""

    engine: TrainEngine
    role: str
    """Role whose weights in the engine are the teacher's."""
    temperature: float
    rates_samples: bool
    """Whether what the policy sampled is compared."""
    top_k: int
    """How many tokens of its own are compared in the place of each."""

    def evaluate(self, batch: TrainBatch, *, updates: bool = True) -> None:
        """Fill in what is compared, from one pass over the samples.

        :param updates: Or leave out what the loss of the policy alone reads.
        """
        options: dict[str, Any] = {"temperature": self.temperature, "role": self.role}
        if self.top_k and updates:
            batch.teacher_top_k = self.engine.top_k_log_probs(batch, self.top_k, **options)
        if self.rates_samples:
            sampled = batch.teacher_top_k and batch.teacher_top_k.sampled
            batch.teacher_log_probs = self.engine.log_probs(batch, **options) if sampled is None else sampled


def make_teacher(config: Config, context: WorkerContext, trainer: TrainEngine) -> Teacher | None:
    """Return the teacher, if there is one.

    One with the policy's tensors, divided as these are, borrows their memory; another one is an engine
    without an optimizer.
    """
    if not has_teacher(config, context.plugins):
        return None
    own, engine, role = teacher_config(config), trainer, TEACHER
    spec: TrainEngineSpec = context.plugins.get("register_train_engines", config.train.engine)
    borrows = own.train.parallel == config.train.parallel and is_same_model(
        own.model.path, config.model.path, context.plugins, spec, modalities(config)
    )
    if borrows:
        trainer.load_role(TEACHER, str(own.model.path))
    else:
        engine, role = maker(config, context, "make_forward_only", TEACHER)(own, context), "actor"
    return Teacher(
        engine=engine,
        role=role,
        temperature=config.rollout.temperature,
        rates_samples=rates_samples(config, context.plugins),
        top_k=config.algorithm.distill_top_k if config.algorithm.distill_kl_coef > 0 else 0,
    )


def maker(config: Config, context: WorkerContext, name: str, role: str) -> Callable[..., Any]:
    """Return the maker of a further engine: a field of the train engine's spec.

    :raises ConfigError: The train engine has none for this role.
    """
    spec = context.plugins.get("register_train_engines", config.train.engine)
    make: Callable[..., Any] | None = getattr(spec, name)
    if make is None:
        raise ConfigError(
            f"train.engine = {config.train.engine!r} has no engine for the {role}.",
            hint="Take another engine, or an algorithm that needs none.",
        )
    return make


def is_same_model(
    one: Path,
    other: Path,
    plugins: LoadedPlugins,
    engine: TrainEngineSpec,
    kinds: Collection[MediaKind] = (),
) -> bool:
    """Return whether two Hugging Face directories hold models that compute the same of the same weights.

    :param engine: The train engine that builds both.
    :param kinds: Kinds of media that they are shown.
    """
    texts = [(path / "config.json").read_text(encoding="utf-8") for path in (one, other)]
    hfs = [text_config(json.loads(each)) for each in texts]
    specs: list[ModelSpec] = [family(plugins, hf, engine.name) for hf in hfs]
    return specs[0].name == specs[1].name and not differing_keys(specs[0], hfs[0], hfs[1], engine, kinds)
