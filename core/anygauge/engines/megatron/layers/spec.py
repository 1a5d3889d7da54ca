"""The decoder as Megatron module specs: each layer by its kind, from the classes of a provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from anygauge.engines.megatron.layers import gated_delta, latent_attention
from anygauge.engines.megatron.layers.layer import DecoderLayer, DecoderLayerSubmodules, MlpSpec
from anygauge.engines.megatron.layers.moe import ExpertLayer
from anygauge.engines.megatron.layers.provider import SpecProvider
from anygauge.engines.megatron.layers.self_attention import GatedAttention, SelfAttention
from anygauge_hooks.megatron import LayerKind

__all__ = ["decoder_spec", "first_stage_depth", "layer_spec", "stage_layers"]


# -------------------------------------------------------------------------
# Attention
# -------------------------------------------------------------------------

AttentionSpec = Callable[..., ModuleSpec]
"""Returns the module spec of a layer's attention, from provider, config and fields of its kind."""


def self_attention(
    provider: SpecProvider,
    config: TransformerConfig,
    module: type = SelfAttention,
    window: int | None = None,
    wide_qk_norm: bool = False,
) -> ModuleSpec:
    """Return attention with grouped queries; queries and keys are normalized where the config says so.

    :param window: How many of the last tokens a token sees; ``None`` for all.
    :param wide_qk_norm: Whether they are normalized over all heads.
    """
    core = provider.core_attention()
    norms = (provider.norm() if config.qk_layernorm else None,) * 2
    if wide_qk_norm:
        heads = config.num_attention_heads, config.num_query_groups
        norms = provider.wide_norm(heads[0]), provider.wide_norm(heads[1])
    submodules = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_linear(),
        core_attention=core if window is None else partial(core, window=window),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=norms[0],
        k_layernorm=norms[1],
    )
    return ModuleSpec(module=module, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def gated_delta_net(provider: SpecProvider, config: TransformerConfig) -> ModuleSpec:
    """Return a gated delta net; its sizes are fields of the config."""
    submodules = gated_delta.GatedDeltaNetSubmodules(
        in_proj=provider.column_parallel_linear(),
        delta_rule=provider.delta_rule(),
        out_norm=provider.gated_norm(),
        out_proj=provider.row_parallel_linear(),
    )
    return ModuleSpec(module=gated_delta.GatedDeltaNet, submodules=submodules)


_ATTENTION: dict[str, tuple[AttentionSpec, str]] = {
    "self": (self_attention, "self_attention.linear_qkv.layer_norm_"),
    "gated": (partial(self_attention, module=GatedAttention), "self_attention.linear_qkv.layer_norm_"),
    "latent": (latent_attention.attention_spec, "input_layernorm."),
    "gated_delta": (gated_delta_net, "self_attention.in_proj.layer_norm_"),
}
"""Attention and the canonical name of the norm before it, by kind of layer. Transformer Engine fuses that
norm into the linear that follows, where one follows; our layers keep it as a module."""


# -------------------------------------------------------------------------
# MLP
# -------------------------------------------------------------------------


def _linears(provider: SpecProvider) -> MLPSubmodules:
    return MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(),
        linear_fc2=provider.row_parallel_linear(),
        activation_func=provider.gated_activation(),
    )


def dense_mlp(provider: SpecProvider) -> ModuleSpec:
    """Return a gated MLP."""
    return ModuleSpec(module=MLP, submodules=_linears(provider))


def expert_mlp(provider: SpecProvider) -> MlpSpec:
    """Return a mixture of experts; the config says whether there is a shared one."""
    submodules = MoESubmodules(
        router=provider.router(),
        experts=provider.experts(),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_linears(provider)),
    )
    return MlpSpec(module=ExpertLayer, submodules=submodules, params={"dispatcher": provider.dispatcher()})


_MLP: dict[str, tuple[Callable[[SpecProvider], Any], str]] = {
    "dense": (dense_mlp, "mlp.linear_fc1.layer_norm_"),
    "moe": (expert_mlp, "pre_mlp_layernorm."),
}
"""MLP and the canonical name of the norm before it, by kind of layer."""


# -------------------------------------------------------------------------
# Layers
# -------------------------------------------------------------------------


def layer_spec(provider: SpecProvider, kind: LayerKind, config: TransformerConfig) -> ModuleSpec:
    """Return one decoder layer."""
    if kind.build is not None:
        return kind.build(provider, config)
    attention, attention_norm = _ATTENTION[kind.attention]
    mlp, mlp_norm = _MLP[kind.mlp]
    options = {"window": kind.window, "wide_qk_norm": kind.wide_qk_norm}
    given = {name: value for name, value in options.items() if value}
    before = provider.norm() if kind.pre_norms else IdentityOp
    layer = DecoderLayerSubmodules(
        input_layernorm=before,
        self_attention=attention(provider, config, **given),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=before,
        mlp=mlp(provider),
        mlp_bda=get_bias_dropout_add,
        post_norm=provider.norm() if kind.post_norms else None,
        rotary=kind.rotary,
        sharded_state_dict_keys_map={"input_layernorm.": attention_norm, "pre_mlp_layernorm.": mlp_norm},
    )
    return ModuleSpec(module=DecoderLayer, submodules=layer)


def stage_layers(config: TransformerConfig, vp_stage: int | None = None) -> range:
    """Return the global indices of the layers of this pipeline rank, or of one of its model chunks."""
    first = get_transformer_layer_offset(config, vp_stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage))


def first_stage_depth(config: TransformerConfig) -> int:
    """Return how many layers the first chunk of the first pipeline rank has; every rank may ask."""
    chunk = None if config.virtual_pipeline_model_parallel_size is None else 0
    depth: int = get_num_layers_to_build(config, chunk, pp_rank=0)
    return depth


def decoder_spec(
    provider: SpecProvider, kinds: Sequence[LayerKind], config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage and the final norm.

    :param kinds: The kind of every layer of the model.
    :param vp_stage: Which model chunk, under the interleaved schedule.
    """
    layers = [layer_spec(provider, kinds[index], config) for index in stage_layers(config, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.norm())
