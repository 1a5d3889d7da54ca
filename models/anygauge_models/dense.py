"""Dense decoders with grouped queries, RMS norms and gated MLPs: what their families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from anygauge_models.rope import Rotary, half_rotary
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
    has_wide_qk_norm: bool = False
    """Whether queries and keys are normalized over all heads."""
    has_pre_norms: bool = True
    """Whether there are norms before attention and MLP."""
    rotary_layers: Callable[[Mapping[str, Any]], Sequence[bool]] = lambda hf: [True] * hf["num_hidden_layers"]
    """For each layer, whether its queries and keys turn with the position."""
    windows: Callable[[Mapping[str, Any]], Sequence[int | None]] = lambda hf: [None] * hf["num_hidden_layers"]
    """For each layer, how many of the last tokens a token sees."""
    layer_type: Callable[[Mapping[str, Any], str], Mapping[str, Any]] | None = None
    """Returns a config with the angles of a type of layers, where those with a window have others."""
    embedding_scale: Callable[[Mapping[str, Any]], float] | None = None
    """Factor of the embeddings."""
    post_norms: tuple[str, str] | None = None
    """Names of the norms of what attention and MLP add in a checkpoint, where there are such norms."""
    has_fused_qkv: bool = False
    """Whether checkpoints hold queries above keys above values in one tensor."""
    has_fused_mlp: bool = False
    """Whether checkpoints hold gate above up in one tensor."""
    mlp_norm: str = "post_attention_layernorm"
    """Name of the norm before the MLP in a checkpoint."""
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: {}
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
        return decoder_config(hf, **self.attention(hf), **switches, **self.fields(hf))

    def layers(self, hf: Mapping[str, Any]) -> list[LayerKind]:
        """Return the kind of each layer."""
        return [
            LayerKind(
                rotary="local" if turns and window and self.layer_type else turns,
                window=window,
                wide_qk_norm=self.has_wide_qk_norm,
                pre_norms=self.has_pre_norms,
                post_norms=self.post_norms is not None,
            )
            for turns, window in zip(self.rotary_layers(hf), self.windows(hf), strict=True)
        ]

    def flops_per_token(self, hf: Mapping[str, Any], sequence_length: int) -> float:
        """Return the floating-point operations of a forward pass per token, causal attention counted once."""
        return dense_flops(hf, sequence_length, self.windows(hf), **self.attention(hf))

    def weight_rules(self, hf: Mapping[str, Any]) -> list[WeightRule]:
        """Return one rule for each canonical tensor."""
        attention = self_attention(
            **self.attention(hf),
            qk_norm=self.has_qk_norm or self.has_wide_qk_norm,
            pre_norm=self.has_pre_norms,
            bias=self.has_bias(hf),
            fused=self.has_fused_qkv,
        )
        mlp = dense_mlp(
            hf["intermediate_size"],
            fused=self.has_fused_mlp,
            norm=self.mlp_norm if self.has_pre_norms else None,
        )
        added = post_norms(*self.post_norms) if self.post_norms else ()
        return decoder_rules(hf, [*attention, *mlp, *added])

    def _rotary_of(self, kind: str) -> Rotary:
        """Return the angles of a type of layers."""
        rotary, read = half_rotary(self.rotary_dim or self.head_dim), self.layer_type
        return rotary if read is None else lambda hf, positions: rotary(read(hf, kind), positions)

    def spec(
        self, architecture: str, *, tiny: Callable[[], Mapping[str, Any]] | None = None, **defaults: Any
    ) -> ModelSpec:
        """Return the family.

        :param tiny: See :func:`make_family`.
        :param defaults: Defaults of transformers, for keys that a config may lack; see :func:`make_family`.
        """
        model = MegatronModel(
            transformer_config=self.transformer_config,
            weight_rules=self.weight_rules,
            rotary=self._rotary_of("full_attention"),
            local_rotary=None if self.layer_type is None else self._rotary_of("sliding_attention"),
            embedding_scale=self.embedding_scale,
            layers=self.layers,
        )
        return make_family(
            self.family,
            architecture,
            model=model,
            flops_per_token=self.flops_per_token,
            defaults=defaults,
            tiny=tiny,
        )
