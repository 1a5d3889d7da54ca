"""What a model plugin declares about a family of architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AssistantTurns", "ModelSpec", "Transform", "WeightRule"]

Transform = Literal["copy", "interleave_qkv", "concat_gate_up"]
"""How Hugging Face tensors become one canonical tensor:

``copy``
    One tensor, unchanged.
``interleave_qkv``
    ``q, k, v`` projections become one matrix ordered by query group: the group's queries, its key, its value.
``concat_gate_up``
    Gate rows, then up rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRule:
    """One canonical tensor and the Hugging Face tensors that it is made of.

    ``{layer}`` in a name stands for the layer index.

    Example::

        WeightRule(canonical="decoder.layers.{layer}.self_attention.linear_proj.weight",
                   hf=("model.layers.{layer}.self_attn.o_proj.weight",), split_dim=1)
    """

    canonical: str
    """Transformer Engine's parameter name."""
    hf: tuple[str, ...]
    transform: Transform = "copy"
    split_dim: int | None = None
    """Dimension that tensor parallelism splits; ``None`` replicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurns:
    r"""How a family's chat template writes the assistant's turns. SFT trains on what is between the two.

    Example::

        AssistantTurns(start="<|im_start|>assistant\n", end="<|im_end|>")
    """

    start: str
    """What comes before the content of a turn; not trained on."""
    end: str
    """What closes a turn; trained on, since the policy has to write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A family of models."""

    name: str
    architectures: tuple[str, ...]
    """Exact entries of ``architectures`` in the Hugging Face ``config.json``."""
    transformer_config: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """From the Hugging Face config, as a mapping, to fields of Megatron's ``TransformerConfig``."""
    model_options: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """From the Hugging Face config to ``vocab_size``, ``max_sequence_length``, ``tie_embeddings``."""
    weight_rules: Callable[[Mapping[str, Any]], Sequence[WeightRule]]
    """From the Hugging Face config to the mapping of every weight."""
    rotary: Callable[[Mapping[str, Any], Tensor], tuple[Tensor, Tensor]]
    """From the Hugging Face config and positions ``[T]`` (int64) to ``cos, sin`` ``[T, R]``, float32."""
    flops_per_token: Callable[[Mapping[str, Any], int], float]
    """Floating-point operations of one forward pass per token, given the sequence length."""
    tiny: Callable[[], Mapping[str, Any]]
    """A Hugging Face config of a model that trains on a laptop in seconds."""
    assistant_turns: AssistantTurns | None = None
    """For SFT on chats; ``None`` if the family has no chat template."""
