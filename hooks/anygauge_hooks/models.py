"""Declarations of a model plugin about a family of architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from anygauge_hooks.media import MediaSpec

__all__ = ["ModelSpec", "TransformersModel", "text_config", "transformers_model"]


def text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the Hugging Face config of a text model, which may be one part of a larger model.

    What the larger model says itself goes before what its ``text_config`` says, which stays there: weights of
    a part have other names. A model that thinks before it speaks has it in its ``thinker_config``. A config
    without one is returned as it is.
    """
    if isinstance(thinker := hf.get("thinker_config"), Mapping):
        return {**text_config(thinker), **hf}
    inside = hf.get("text_config")
    return {**inside, **hf} if isinstance(inside, Mapping) else hf


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersModel:
    """How engines of transformers' models build a family that the library has no class for."""

    build: Callable[[Mapping[str, Any], torch.dtype], Any]
    """From the Hugging Face config and a dtype to a transformers ``PreTrainedModel`` whose tensors have the
    checkpoint's names. Its weights need no values. Towers have the names of the family's ``TowerSpec``."""


def _none(hf: Mapping[str, Any]) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A family of models."""

    name: str
    architectures: tuple[str, ...]
    """Exact entries of ``architectures`` in the Hugging Face ``config.json``."""
    model_options: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Function from the Hugging Face config to ``vocab_size``, ``max_sequence_length``,
    ``tie_embeddings``."""
    flops_per_token: Callable[[Mapping[str, Any], int], float]
    """Floating-point operations of one forward pass per token, given the sequence length."""
    tiny: Callable[[], Mapping[str, Any]]
    """A Hugging Face config of a model that trains on a laptop in seconds."""
    unused_weights: Callable[[Mapping[str, Any]], Sequence[str]] = _none
    """From the Hugging Face config to prefixes of tensors in its checkpoints that the model does not have,
    such as multi-token prediction heads."""
    carried_weights: Callable[[Mapping[str, Any]], Sequence[str]] = _none
    """From the Hugging Face config to those of ``unused_weights`` that exports copy from ``model.path``,
    because the class that their ``config.json`` names has them."""
    read_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = text_config
    """From the Hugging Face config to that of the language model, with the family's defaults for keys that it
    lacks. Sizes of a model are read from it before a run (``anygauge plan``)."""
    rollout_engines: tuple[str, ...] | None = None
    """Names of the rollout engines that have a model for the family, where they are few or none; ``None``
    leaves it to each engine to say so when it starts."""
    media: MediaSpec | None = None
    """Images, video and audio of the family; ``None`` if it takes only text."""
    refused_media: str = ""
    """Reason why it takes no more kinds of media, where its published models do."""
    engines: Mapping[str, object] = field(default_factory=dict)
    """How engines build the family, by the engine's name: ``{"megatron": MegatronModel(...)}``. Engines that
    build any Hugging Face model need no entry; the rollout engine ``transformers`` takes a
    :class:`TransformersModel` for a family that the library does not have."""


def transformers_model(spec: ModelSpec) -> TransformersModel | None:
    """Return how a family is built that transformers has no class for; ``None`` if it has one."""
    own = spec.engines.get("transformers")
    return own if isinstance(own, TransformersModel) else None
