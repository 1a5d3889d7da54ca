"""Declarations of a model plugin about a family of architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.media import MediaSpec

__all__ = ["AssistantTurns", "LayerKind", "ModelSpec", "Transform", "WeightRule", "text_config"]

Transform = Literal["copy", "concat", "interleave"]
"""How Hugging Face tensors become one canonical tensor:

``copy``
    One tensor, unchanged.
``concat``
    One under another along dimension 0, such as gate above up.
``interleave``
    Each is cut into ``groups`` equal parts along dimension 0, and the parts are put group by group: with
    ``q, k, v`` projections, a group's queries, its key, its value.
"""


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
class WeightRule:
    """One canonical tensor and the Hugging Face tensors that it is made of.

    ``{layer}`` in a name stands for the layer index, ``{expert}`` for the global index of an expert.

    Example::

        WeightRule(canonical="decoder.layers.{layer}.mlp.linear_fc1.weight",
                   hf=("model.layers.{layer}.mlp.gate_proj.weight",
                       "model.layers.{layer}.mlp.up_proj.weight"),
                   transform="concat", sections=((1024,), (1024,)), split_dim=0)
    """

    canonical: str
    """Transformer Engine's parameter name."""
    hf: tuple[str, ...]
    transform: Transform = "copy"
    sections: tuple[tuple[int, ...], ...] = ()
    """For each Hugging Face tensor, the sizes along ``split_dim`` of the parts that it consists of. With
    ``copy`` and ``concat`` tensor parallelism splits each part by itself, so that every rank has its share of
    gate and of up. ``concat`` and ``interleave`` need it; without it a tensor is one part."""
    groups: int = 1
    """Query groups, for ``interleave``. Tensor parallelism gives whole groups to a rank."""
    split_dim: int | None = None
    """Dimension of the canonical tensor that tensor parallelism splits; ``None`` replicates. With
    ``{expert}`` it is what expert tensor parallelism splits."""
    layers: tuple[int, ...] | None = None
    """Layers that have the tensor; ``None`` for all."""
    experts: int = 0
    """Number of experts, where ``{expert}`` is in the canonical name. Where it is not in the Hugging Face
    names, those tensors are stacks ``[experts, ...]`` of what the rule describes."""
    transposed: bool = False
    """Whether the matrices of such stacks are transposed in checkpoints."""
    pads_vocab: bool = False
    """Whether dimension 0 is the vocabulary, which is padded to a multiple of the ranks that split it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurns:
    r"""How a family's chat template writes the assistant's turns. SFT trains on what is between the two.

    Example::

        AssistantTurns(start="<|im_start|>assistant\n", end="<|im_end|>")
    """

    start: str
    """Text before the content of a turn; not trained on."""
    end: str
    """Text that closes a turn; trained on, since the policy has to write it."""


def _none(hf: Mapping[str, Any]) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Modules of one decoder layer. Sizes and switches are fields of the transformer config.

    Example::

        LayerKind(attention="latent", mlp="moe")
    """

    attention: Literal["self", "gated", "latent", "gated_delta"] = "self"
    """``self`` has grouped queries; ``gated`` multiplies its output with a gate that comes with the queries;
    ``latent`` compresses keys and values; ``gated_delta`` is a linear recurrence."""
    mlp: Literal["dense", "moe"] = "dense"
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalised too, before they are added."""
    build: Callable[..., Any] | None = None
    """``build(provider, config)`` returns Megatron's module spec of a layer that none of these describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A family of models."""

    name: str
    architectures: tuple[str, ...]
    """Exact entries of ``architectures`` in the Hugging Face ``config.json``."""
    transformer_config: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Function from the Hugging Face config, a mapping, to fields of Megatron's ``TransformerConfig``."""
    model_options: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Function from the Hugging Face config to ``vocab_size``, ``max_sequence_length``,
    ``tie_embeddings``."""
    weight_rules: Callable[[Mapping[str, Any]], Sequence[WeightRule]]
    """Function from the Hugging Face config to the mapping of every weight."""
    rotary: Callable[[Mapping[str, Any], Tensor], tuple[Tensor, Tensor]]
    """From the Hugging Face config and positions ``[T]`` (int64) to ``cos, sin`` ``[T, R]``, float32.

    A model with images takes positions ``[3, T]`` of time, height and width too."""
    flops_per_token: Callable[[Mapping[str, Any], int], float]
    """Floating-point operations of one forward pass per token, given the sequence length."""
    tiny: Callable[[], Mapping[str, Any]]
    """A Hugging Face config of a model that trains on a laptop in seconds."""
    layers: Callable[[Mapping[str, Any]], Sequence[LayerKind]]
    """Function from the Hugging Face config to the kind of each layer, in order."""
    unused_weights: Callable[[Mapping[str, Any]], Sequence[str]] = _none
    """From the Hugging Face config to prefixes of tensors in its checkpoints that the model does not have,
    such as multi-token prediction heads."""
    build: Callable[..., Any] | None = None
    """``build(config=, hf=, decoder=, pre_process=, post_process=, vp_stage=)`` returns the whole model,
    where it is more than embedding, decoder and output layer; ``decoder`` is the spec of the layers. It is a
    ``MegatronModule`` with what Megatron asks every model for: ``model_type``, ``pre_process``,
    ``post_process``, ``vp_stage``, ``share_embeddings_and_output_weights``,
    ``shared_embedding_or_output_weight()`` and ``set_input_tensor()``."""
    output_owner: str = ""
    """Path from the model to the module whose ``output_layer`` the loss or a critic's head replaces, such as
    ``language_model``; empty for the model itself. It has Megatron's ``post_process`` on every stage."""
    assistant_turns: AssistantTurns | None = None
    """For SFT on chats; ``None`` if the family has no chat template."""
    rollout_engines: tuple[str, ...] | None = None
    """Names of the rollout engines that have a model for the family, where they are few or none; ``None``
    leaves it to each engine to say so when it starts."""
    media: MediaSpec | None = None
    """Images, video and audio of the family; ``None`` if it takes text alone. :attr:`build` of a family that
    has one is called with ``compose=`` too, a :class:`~anygauge_hooks.media.Compose`."""
