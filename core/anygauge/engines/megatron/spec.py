"""The transformer layer as a Megatron module spec, from the classes of a spec provider."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from anygauge.engines.megatron.modules import CoreAttention, RmsNorm, Swiglu
from anygauge.kernels.table import KernelTable

__all__ = ["CANONICAL_PREFIXES", "KernelSpecProvider", "SpecProvider", "decoder_spec", "layer_spec"]


CANONICAL_PREFIXES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Where checkpoints put the norms that our layers keep as modules: under the names of Transformer Engine,
which fuses each into the linear that follows."""


class SpecProvider(Protocol):
    """Names the module class, or a builder with its signature, for each part of a layer."""

    def norm(self) -> Any:
        """Return the norm of hidden states, queries and keys."""

    def core_attention(self) -> Any:
        """Return the builder of rotary embedding and attention."""

    def column_parallel_linear(self) -> Any:
        """Return the linear whose output is split."""

    def row_parallel_linear(self) -> Any:
        """Return the linear whose input is split."""

    def gated_activation(self) -> Any:
        """Return the builder of the gated activation."""


class KernelSpecProvider:
    """The default: Megatron's linears, our modules bound to the kernel table."""

    def __init__(self, kernels: KernelTable) -> None:
        self.kernels = kernels

    def norm(self) -> ModuleSpec:
        """Return :class:`RmsNorm`."""
        return ModuleSpec(module=RmsNorm, params={"kernels": self.kernels})

    def core_attention(self) -> Any:
        """Return :class:`CoreAttention`."""
        return partial(CoreAttention, kernels=self.kernels)

    def column_parallel_linear(self) -> type:
        """Return Megatron's own."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Return Megatron's own."""
        return RowParallelLinear

    def gated_activation(self) -> ModuleSpec:
        """Return :class:`Swiglu`."""
        return ModuleSpec(module=Swiglu, params={"kernels": self.kernels})


def layer_spec(provider: SpecProvider) -> ModuleSpec:
    """Return one pre-norm decoder layer with query and key norms and a gated MLP."""
    attention = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=provider.norm(),
        k_layernorm=provider.norm(),
    )
    mlp = MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(),
        linear_fc2=provider.row_parallel_linear(),
        activation_func=provider.gated_activation(),
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=provider.norm(),
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=provider.norm(),
        mlp=ModuleSpec(module=MLP, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=CANONICAL_PREFIXES,
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def decoder_spec(provider: SpecProvider, num_layers: int) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage and the final norm."""
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(provider)] * num_layers, layer_norm=provider.norm()
    )
