"""The models of a run and how each is divided."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from anygauge.config.schema.section import DType, NonNegative, Positive, Section, list_as_tuple

__all__ = ["Critic", "Model", "Parallel", "Reference", "Teacher"]

Modality = Literal["image", "video", "audio"]


def _no_name(value: Any) -> Any:
    """Return ``./OWNER/NAME`` and ``OWNER/NAME/`` as absolute paths if missing; ``Path`` drops the marks."""
    is_path = isinstance(value, str) and (value.startswith("./") or value.endswith("/"))
    return str(Path.cwd() / value) if is_path and not os.path.exists(value) else value


ModelPath = Annotated[Path, BeforeValidator(_no_name)]
"""Directory of a model, or its name on a hub."""


class Parallel(Section):
    """How one model is divided among workers; what is left of them holds copies of it (data parallel).

    ``train_workers = tensor * pipeline * context * data``, in Megatron's order of ranks.
    """

    tensor: Positive = 1
    """Ranks that split every matrix."""
    sequence: bool | None = None
    """Split what is between the matrices by tokens; ``None`` does so where ``tensor`` is above 1."""
    pipeline: Positive = 1
    """Ranks that split the layers."""
    virtual_pipeline: Positive = 1
    """Model chunks of each pipeline rank (interleaved schedule)."""
    context: Positive = 1
    """Ranks that split every sequence."""
    expert: Positive = 1
    """Ranks that split the experts; a divisor of ``tensor * context * data`` over ``expert_tensor``."""
    expert_tensor: Positive = 1
    """Ranks that split each expert's matrices."""
    replicate: Positive = 1
    """Copies of the model, each sharded over a part of the workers (HSDP); on the FSDP engine alone."""
    reshard_after_forward: bool = True
    """Free gathered weights after each layer. ``False`` keeps them, and gradients before they are summed over
    ranks, within an optimizer step; on the FSDP engine alone."""


class Model(Section):
    """The policy. ``model = "Qwen/Qwen3-0.6B"`` is short for a table with this path."""

    path: ModelPath
    """Hugging Face directory, or a name on the hub: ``Qwen/Qwen3-0.6B``."""
    revision: str | None = None
    """Branch, tag or commit of a name on the hub."""
    trust_remote_code: bool = False
    """Let Python files of the checkpoint run. Without, a checkpoint that needs them is refused."""
    modalities: Annotated[tuple[Modality, ...] | None, BeforeValidator(list_as_tuple)] = None
    """Modalities of the model's inputs; towers of other modalities are not built. ``None`` takes the kinds of
    ``data.multimodal_keys`` and of ``eval.datasets``; name them where only tools return images."""


class Reference(Section):
    """The frozen policy of the KL terms. Used if ``algorithm.kl_coef`` or ``kl_reward_coef`` is above 0."""

    path: ModelPath | None = None
    """Hugging Face directory or hub name of the same architecture; ``None`` takes ``model.path``."""


class Teacher(Section):
    """The frozen model that is distilled: ``algorithm.distill_coef``, ``distill_kl_coef`` or an estimator."""

    path: ModelPath | None = None
    """Hugging Face directory or hub name of a model with the same vocabulary."""
    parallel: Parallel | None = None
    """How it is divided among the workers; ``None`` takes ``train.parallel``."""
    megatron: dict[str, Any] | None = None
    """Fields of Megatron's configs; ``None`` takes ``train.megatron``."""


class Critic(Section):
    """The model that expects the rewards, trained where the advantage estimator needs values (``gae``)."""

    path: ModelPath | None = None
    """Hugging Face directory or hub name: a language model, whose output layer a value head replaces, an
    exported critic, or a reward model with one label; ``None`` takes ``model.path``."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; ``None`` takes ``train.lr``."""
    lr_warmup_steps: NonNegative | None = None
    """Optimizer steps of linear warm-up; ``None`` takes ``train.warmup_steps``."""
    warmup_steps: NonNegative = 0
    """Steps at the start of the run that train the critic and leave the policy as it is."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Clip range of a value around its value before the step's first update, in units of the reward; ``None``
    does not clip."""
    dtype: DType | None = None
    """Precision of the weights; ``None`` takes ``train.dtype``."""
    parallel: Parallel | None = None
    """How it is divided among the workers; ``None`` takes ``train.parallel``."""
    megatron: dict[str, Any] | None = None
    """Fields of Megatron's configs; ``None`` takes ``train.megatron``."""
