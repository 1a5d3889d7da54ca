"""Roles of a run: which components it builds, and the config of each model beside the policy.

A role's config has the role in the place of the policy; what is the policy's alone never reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import Config, Critic, Lora, Teacher
from anygauge_hooks.errors import ConfigError

__all__ = [
    "Components",
    "as_classifier",
    "as_language_model",
    "critic_config",
    "evaluation_components",
    "run_components",
    "teacher_config",
]

CLASSIFIER, LANGUAGE_MODEL = "ForSequenceClassification", "ForCausalLM"
"""How transformers ends the names of two architectures that differ in their output layer alone."""

ACTOR_ONLY = {"router_replay": False, "lora": Lora()}
"""Settings of ``[train]`` that no other model has: routes are those that the policy's own pass captured, and
a critic is trained in full."""


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
    """Return the components that a run builds; a debug mode leaves out some."""
    mode = config.debug.mode
    trains = mode != "rollout_only"
    return Components(trains=trains, generates=mode != "train_only" and config.samples, learns=trains)


def evaluation_components(config: Config, *, loads: bool) -> Components:
    """Return the components that ``anygauge eval`` builds.

    :param loads: Whether it reads a checkpoint, which only train engines can.
    """
    given = bool(config.rollout.external)  # they have whatever weights they have, until they are sent others
    merges = config.starts_elsewhere  # which a train engine does
    trains = loads or given or merges or config.run.task == "sft"
    return Components(trains=trains, generates=config.samples)


def critic_config(config: Config) -> Config:
    """Return the config of the critic."""
    critic, train = config.critic, config.train
    lr = train.lr if critic.lr is None else critic.lr
    warmup = train.warmup_steps if critic.lr_warmup_steps is None else critic.lr_warmup_steps
    overrides = {
        "lr": lr,
        "min_lr": min(train.min_lr, lr),
        "warmup_steps": warmup,
        "dtype": critic.dtype or train.dtype,
    }
    config = config.model_copy(update={"critic": critic.model_copy(update={"warmup_steps": 0})})
    return _with_model(config, critic, overrides)


def teacher_config(config: Config) -> Config:
    """Return the config of the teacher, which is not trained."""
    return _with_model(config, config.teacher, {"freeze": ()})


def _with_model(config: Config, role: Critic | Teacher, train: dict[str, Any]) -> Config:
    divided = {
        "parallel": config.train.parallel if role.parallel is None else role.parallel,
        "megatron": config.train.megatron if role.megatron is None else role.megatron,
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": role.path or config.model.path}),
            "train": config.train.model_copy(update={**ACTOR_ONLY, **divided, **train}),
        }
    )


def as_language_model(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a classifier, such as a reward model, as that of the language model that it was.

    Others are returned as they are. A critic is the one with one label.

    :param hf: Content of a ``config.json``.
    :raises ConfigError: It has several labels.
    """
    names = hf.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(CLASSIFIER) for name in names):
        return {**hf}
    labels = hf.get("num_labels", len(hf.get("id2label") or ("one",)))
    if labels != 1:
        raise ConfigError(
            f"its config.json has {labels} labels; a critic has one.",
            hint="Point critic.path at a language model, or at a reward model with one label.",
        )
    return {**hf, "architectures": [_ending(str(name), CLASSIFIER, LANGUAGE_MODEL) for name in names]}


def as_classifier(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in which a critic's ``config.json`` differs from its language model's."""
    names = hf.get("architectures") or ()
    one = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [_ending(str(name), LANGUAGE_MODEL, CLASSIFIER) for name in names], **one}


def _ending(name: str, before: str, after: str) -> str:
    return name.removesuffix(before) + after if name.endswith(before) else name
