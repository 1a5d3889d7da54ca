"""From Qwen3's Hugging Face config to Megatron's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.errors import ConfigError

__all__ = ["flops_per_token", "head_dim", "model_options", "tiny", "transformer_config"]


def head_dim(hf: Mapping[str, Any]) -> int:
    """Return the size of one attention head."""
    return int(hf.get("head_dim", 128))


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    _refuse_variants(hf)
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": head_dim(hf),
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "attention_dropout": 0.0,  # a policy's ratio would be noise with it
        "hidden_dropout": 0.0,
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _refuse_variants(hf: Mapping[str, Any]) -> None:
    """Refuse what would silently be another model."""
    sliding = any(kind != "full_attention" for kind in hf.get("layer_types") or ())
    for key, is_variant, needs in (
        ("hidden_act", hf.get("hidden_act", "silu") != "silu", "silu"),
        ("layer_types", sliding, "full_attention in every layer"),
        ("use_sliding_window", bool(hf.get("use_sliding_window")), "false"),
        ("attention_bias", bool(hf.get("attention_bias")), "false"),
    ):
        if is_variant:
            raise ConfigError(
                f"The checkpoint's {key} = {hf[key]!r} is not supported by the qwen3 family, "
                f"which needs {needs}.",
                hint="No published Qwen3 model has it; check config.json.",
            )


def model_options(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return vocabulary size, longest sequence, and whether the embeddings are tied."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    hidden, heads, groups = hf["hidden_size"], hf["num_attention_heads"], hf["num_key_value_heads"]
    size = head_dim(hf)
    projections = hidden * size * (2 * heads + 2 * groups) + 3 * hidden * hf["intermediate_size"]
    scores = heads * size * sequence_length
    layers = hf["num_hidden_layers"] * (projections + scores)
    return 2.0 * float(layers + hidden * hf["vocab_size"])


def tiny() -> dict[str, Any]:
    """Return a config that trains on a laptop in seconds."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
