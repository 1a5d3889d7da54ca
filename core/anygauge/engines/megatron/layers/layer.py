"""Megatron decoder layer with additions of some families: norms of the branches, expert routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from anygauge.engines.megatron.layers.modules import PackedSequences, is_megatrons, is_plain
from anygauge.engines.megatron.layers.moe import ExpertLayer
from anygauge.engines.megatron.layers.self_attention import SelfAttention

__all__ = ["DecoderLayer", "DecoderLayerSubmodules", "MlpSpec"]


@dataclass
class DecoderLayerSubmodules(TransformerLayerSubmodules):
    """Megatron's parts of a layer, and one more."""

    post_norm: Any = None
    """The norm of the outputs of attention and MLP, or ``None``."""
    rotary: bool | Literal["local"] = True
    """Whether queries and keys turn with the position, or by the angles of local layers."""


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Fields of a module spec that ``build_module`` reads.

    Megatron's own class makes its layer warn about an MLP that is not one of four classes.
    """

    module: type
    submodules: Any
    params: Mapping[str, Any]


class DecoderLayer(TransformerLayer):
    """Attention and an MLP, each behind a norm and, where the spec says so, before one.

    The norms of the outputs are those of GLM-4; https://arxiv.org/abs/2105.13290 section 2.3 names the
    arrangement.
    """

    self_attn_bda: Callable[..., Any]
    mlp_bda: Callable[..., Any]

    def __init__(
        self, config: TransformerConfig, submodules: DecoderLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        if submodules.post_norm is not None:
            self.post_self_attn_layernorm = _build_norm(submodules.post_norm, config)
            self.post_mlp_layernorm = _build_norm(submodules.post_norm, config)
            self.self_attn_bda = _after(self.post_self_attn_layernorm, self.self_attn_bda)
            self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)
        self.rotary = submodules.rotary
        self.is_short = submodules.post_norm is None and self._is_short()

    def _is_short(self) -> bool:
        """Return whether nothing but an addition is between attention and the norm after it."""
        config = self.config
        return (
            all(is_megatrons(TransformerLayer, name) for name in ("__init__", "forward", "_forward_post_mlp"))
            and all(is_plain(norm) for norm in (self.input_layernorm, self.pre_mlp_layernorm))
            and type(self.self_attention) is SelfAttention
            and type(self.mlp) is MLP
            and not (config.add_bias_linear or config.hidden_dropout or config.fp32_residual_connection)
            and not (self.recompute_input_layernorm or self.recompute_pre_mlp_layernorm or self.recompute_mlp)
            and not config.fine_grained_activation_offloading
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; experts are told which micro-batch it is, and features of media are added."""
        packed = kwargs.get("packed_seq_params")
        if packed is not None and self.rotary is not True:
            kwargs["packed_seq_params"] = packed.with_local_rotary if self.rotary else packed.without_rotary
        if isinstance(self.mlp, ExpertLayer):
            self.mlp.packed = packed
        if not self.is_short or args or packed is None:
            output = super().forward(*args, **kwargs)
        else:
            output = self._short(kwargs["hidden_states"], kwargs["packed_seq_params"]), None
        for deposits in packed.deposits if packed is not None else ():
            output = deposits.add_to(output[0], self.layer_number - 1), *output[1:]
        return output

    def _short(self, hidden: Tensor, packed: PackedSequences) -> Tensor:
        """Do as Megatron does, with one op where a norm and what goes around it part or meet."""
        hidden, normed = self.input_layernorm(hidden, with_sum=True)
        output, _ = self.self_attention(normed, attention_mask=None, packed_seq_params=packed)
        hidden, normed = self.pre_mlp_layernorm(output, hidden, with_sum=True)
        result: Tensor = self._forward_post_mlp(self.mlp(normed), hidden)
        return result


def _build_norm(spec: Any, config: TransformerConfig) -> nn.Module:
    return build_module(spec, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def _after(norm: nn.Module, bias_dropout_add: Callable[..., Any]) -> Callable[..., Any]:
    """Return a builder like ``bias_dropout_add`` whose function normalizes what it adds."""

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        return partial(_add_normed, norm, bias_dropout_add(training, fused))

    return build


def _add_normed(
    norm: nn.Module,
    add: Callable[..., Tensor],
    output_with_bias: tuple[Tensor, Tensor | None],
    residual: Tensor,
    dropout: float,
) -> Tensor:
    output, bias = output_with_bias
    return add((norm(output if bias is None else output + bias), None), residual, dropout)
