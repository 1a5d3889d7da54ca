"""Dense decoders with grouped queries, RMS norms and gated MLPs: what their families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_hooks.models import ModelSpec
from anygauge_models.architecture import (
    Variant,
    attention_sizes,
    decoder_config,
    dense_flops,
    head_size,
    make_family,
    refuse_variants,
)
from anygauge_models.rope import half_rotary
from anygauge_models.rules import decoder_rules, dense_mlp, post_norms, self_attention

__all__ = ["DenseDecoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseDecoder:
    """One family; functions take its Hugging Face config."""

    family: str
    head_dim: Callable[[Mapping[str, Any]], int] = head_size
    rotary_dim: Callable[[Mapping[str, Any]], int] | None = None
    """Dimensions of a head that turn with the position; ``None`` for all."""
    refused: Callable[[Mapping[str, Any]], Sequence[Variant]] = lambda hf: ()
    """Variants that the family has not. May raise a :class:`ConfigError` of its own."""
    has_bias: Callable[[Mapping[str, Any]], bool] = lambda hf: False
    """Whether queries, keys and values have biases."""
    has_qk_norm: bool = False
    rotary_layers: Callable[[Mapping[str, Any]], Sequence[bool]] = lambda hf: [True] * hf["num_hidden_layers"]
    """For each layer, whether its queries and keys turn with the position."""
    has_post_norms: bool = False
    has_fused_qkv: bool = False
    """Whether checkpoints hold queries above keys above values in one tensor."""
    has_fused_mlp: bool = False
    """Whether checkpoints hold gate above up in one tensor."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``TransformerConfig``."""

    def attention(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return query heads, groups of them, and the size of a head."""
        return attention_sizes(hf, self.head_dim(hf))

    def transformer_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of ``TransformerConfig`` that the architecture fixes.

        :raises ConfigError: The checkpoint uses a variant that is not implemented.
        """
        refuse_variants(hf, self.family, self.refused(hf))
        switches = {"add_qkv_bias": self.has_bias(hf), "qk_layernorm": self.has_qk_norm}
        return decoder_config(hf, **self.attention(hf), **switches, **self.fields)

    def layers(self, hf: Mapping[str, Any]) -> list[LayerKind]:
        """Return the kind of each layer."""
        return [LayerKind(rotary=turns, post_norms=self.has_post_norms) for turns in self.rotary_layers(hf)]

    def flops_per_token(self, hf: Mapping[str, Any], sequence_length: int) -> float:
        """Return the floating-point operations of a forward pass per token, causal attention counted once."""
        return dense_flops(hf, sequence_length, **self.attention(hf))

    def weight_rules(self, hf: Mapping[str, Any]) -> list[WeightRule]:
        """Return one rule for each canonical tensor."""
        attention = self_attention(
            **self.attention(hf),
            qk_norm=self.has_qk_norm,
            bias=self.has_bias(hf),
            fused=self.has_fused_qkv,
        )
        mlp = dense_mlp(hf["intermediate_size"], fused=self.has_fused_mlp)
        return decoder_rules(hf, [*attention, *mlp, *(post_norms() if self.has_post_norms else ())])

    def spec(self, architecture: str, **defaults: Any) -> ModelSpec:
        """Return the family.

        :param defaults: Defaults of transformers, for keys that a config may lack; see :func:`make_family`.
        """
        model = MegatronModel(
            transformer_config=self.transformer_config,
            weight_rules=self.weight_rules,
            rotary=half_rotary(self.rotary_dim or self.head_dim),
            layers=self.layers,
        )
        return make_family(
            self.family,
            architecture,
            model=model,
            flops_per_token=self.flops_per_token,
            defaults=defaults,
        )
