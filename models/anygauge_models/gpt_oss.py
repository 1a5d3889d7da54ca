"""gpt-oss: experts with biases, and attention with sinks, every other layer's within a window.

https://arxiv.org/abs/2508.10925
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anygauge_hooks.megatron import LayerKind, MegatronModel, WeightRule
from anygauge_models.architecture import (
    attention_sizes,
    decoder_config,
    expert_config,
    head_size,
    layer_windows,
    make_family,
    refuse_variants,
    single_expert,
    sparse_flops,
    windowed_flops,
)
from anygauge_models.rope import half_rotary
from anygauge_models.rules import decoder_rules, layer_rule, self_attention

__all__ = ["GPT_OSS"]

_ALPHA = 1.702
"""Factor in the sigmoid of the activation, which Megatron calls quick GELU."""


def _head_dim(hf: Mapping[str, Any]) -> int:
    return head_size(hf, 64)


def _attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    return attention_sizes(hf, _head_dim(hf))


def _windows(hf: Mapping[str, Any]) -> Sequence[int | None]:
    return layer_windows(hf, 2)


def _transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    variants = [
        ("attention_bias", not hf.get("attention_bias", True), "true"),
        ("swiglu_alpha", hf["swiglu_alpha"] != _ALPHA, str(_ALPHA)),
        single_expert(hf),
    ]
    refuse_variants(hf, "gpt_oss", variants)
    experts = expert_config(
        experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        width=hf["intermediate_size"],
        activation_func="quick_gelu",
        activation_func_clamp_value=hf["swiglu_limit"],
        glu_linear_offset=1.0,
    )
    switches: dict[str, Any] = {"add_bias_linear": True, "add_qkv_bias": True, "softmax_type": "learnable"}
    return decoder_config(hf, **_attention(hf), **switches, **experts)


def _weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    rules = [
        *self_attention(**_attention(hf), bias=True),
        layer_rule("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
        layer_rule("self_attention.core_attention.softmax_offset", "self_attn.sinks", split_dim=0),
        layer_rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        *(layer_rule(f"mlp.router.{part}", f"mlp.router.{part}") for part in ("weight", "bias")),
    ]
    return decoder_rules(hf, [*rules, *_experts(hf["num_local_experts"], hf["intermediate_size"])])


def _experts(count: int, width: int) -> list[WeightRule]:
    fc1, fc2 = "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"
    in_turns: dict[str, Any] = {"transform": "deinterleave", "groups": width}
    gate_up: dict[str, Any] = {**in_turns, "sections": ((width, width),), "split_dim": 0}
    down: dict[str, Any] = {"sections": ((width,),), "split_dim": 1}
    weight: dict[str, Any] = {"experts": count, "transposed": True}
    return [
        layer_rule(f"{fc1}.weight{{expert}}", "mlp.experts.gate_up_proj", **gate_up, **weight),
        layer_rule(f"{fc1}.bias{{expert}}", "mlp.experts.gate_up_proj_bias", **gate_up, experts=count),
        layer_rule(f"{fc2}.weight{{expert}}", "mlp.experts.down_proj", **down, **weight),
        layer_rule(f"{fc2}.bias{{expert}}", "mlp.experts.down_proj_bias", experts=count),
    ]


def _layers(hf: Mapping[str, Any]) -> list[LayerKind]:
    return [LayerKind(mlp="moe", window=window) for window in _windows(hf)]


def _flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    attention = windowed_flops(
        hf["hidden_size"], _windows(hf), **_attention(hf), sequence_length=sequence_length
    )
    width = hf["num_experts_per_tok"] * hf["intermediate_size"]
    layers = hf["num_hidden_layers"]
    return sparse_flops(hf, attention, sparse=layers, width=width, experts=hf["num_local_experts"])


GPT_OSS = make_family(
    "gpt_oss",
    "GptOssForCausalLM",
    model=MegatronModel(
        transformer_config=_transformer_config,
        weight_rules=_weight_rules,
        rotary=half_rotary(_head_dim),
        layers=_layers,
    ),
    flops_per_token=_flops_per_token,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
)
