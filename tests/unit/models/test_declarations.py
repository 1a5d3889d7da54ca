"""Declarations of every registered family: FLOPs, refused variants, defaults, angles of older configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import megatron_model
from anygauge_tests.families import FAMILIES, differing_defaults, rotary_of

STATES = {
    "qwen3_5": 2 * 3 * 4 * 16 * 24,
    "qwen3_5_moe": 2 * 3 * 4 * 16 * 24,
    "qwen3_next": 2 * 3 * 4 * 16 * 24,
}
"""Elements of the states of the delta nets: layers, three uses, heads, and the sizes of keys and values."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_flops_of_a_token_are_two_per_weight_that_it_meets(family: str) -> None:
    """Count the experts that a token goes to; transformers has the weights, and vectors only add."""
    spec = FAMILIES[family]
    hf = spec.tiny()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    met = hf["vocab_size"] * hf["hidden_size"] + STATES.get(family, 0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not re.search("embed_tokens|lm_head|bias$", name):
            share = hf["num_experts_per_tok"] / weight.shape[0] if ".experts." in name else 1
            met += weight.numel() * share
    assert spec.flops_per_token(hf, 0) == 2 * met


@pytest.mark.parametrize(
    ("family", "changes", "billions"),
    [
        (
            "qwen3",
            {
                **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
                **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
                **{"vocab_size": 151_936},
            },
            7.57,
        ),
        (
            "qwen3_moe",
            {
                **{"hidden_size": 2048, "num_hidden_layers": 48, "moe_intermediate_size": 768},
                **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
                **{"num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": []},
                **{"vocab_size": 151_936},
            },
            3.04,
        ),
        (
            "glm4_moe",  # GLM-4.5-Air
            {
                **{"hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46},
                **{"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
                **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
                **{"vocab_size": 151_552},
            },
            12.83,
        ),
        (
            "deepseek_v3",
            {
                **{"hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61},
                **{"num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512},
                **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
                **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
                **{"first_k_dense_replace": 3, "vocab_size": 129_280},
            },
            36.62,  # 37.55 with the embedding
        ),
        (
            "qwen3_5_moe",  # Qwen3.5-35B-A3B
            {
                **{"hidden_size": 2048, "num_hidden_layers": 40, "layer_types": None},
                **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
                **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
                **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
                **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
                **{"shared_expert_intermediate_size": 512, "vocab_size": 248_320},
            },
            2.99,  # 0.05 of it are states of 128 x 128 for 32 heads in 30 layers, which are used three times
        ),
    ],
)
def test_flops_of_short_sequences_are_two_per_active_weight(
    family: str, changes: Mapping[str, Any], billions: float
) -> None:
    """Weights that a token meets: all but the embedding, of the experts those that it goes to."""
    spec = FAMILIES[family]
    found = spec.flops_per_token({**spec.tiny(), **changes}, 0)
    assert found == pytest.approx(2e9 * billions, rel=0.01)


HEADS = {
    "deepseek_v3": 3 * 4 * (32 + 16),
    "glm4_moe_lite": 3 * 4 * (32 + 32),
    "gemma3": (0.1 + 1) * 4 * (32 + 32),
    "gpt_oss": (0.1 + 1) * 4 * (32 + 32),
    "olmo3": (0.1 + 1) * 4 * (16 + 16),
    "qwen3_5": 1 * 4 * (32 + 32),
    "qwen3_5_moe": 1 * 4 * (32 + 32),
    "qwen3_next": 1 * 4 * (32 + 32),
}
"""Layers with scores, their heads, and the sizes of a key and of a value, where these are not all alike. A
window of 5 has as many of them as 10 tokens have without, of the 100 here."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_flops_of_the_scores_are_those_of_half_a_square(family: str) -> None:
    """Count by hand: multiplications and additions of queries with keys, and of weights with values."""
    spec = FAMILIES[family]
    hf = spec.tiny()
    size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    per_token = HEADS.get(family, hf["num_hidden_layers"] * hf["num_attention_heads"] * (size + size))
    scores = spec.flops_per_token(hf, 100) - spec.flops_per_token(hf, 0)
    assert scores == pytest.approx(2 * per_token * 100 / 2, rel=1e-12)


REFUSED = [
    ("gpt_oss", "attention_bias", False),
    ("gpt_oss", "swiglu_alpha", 1.5),
    ("gpt_oss", "num_experts_per_tok", 1),
    ("olmo3", "attention_bias", True),
    ("gemma3", "hidden_activation", "gelu"),
    ("gemma3", "attn_logit_softcapping", 50.0),
    ("gemma3", "use_bidirectional_attention", True),
    ("mistral", "sliding_window", 4096),
    ("mistral", "hidden_act", "gelu"),
    ("qwen2", "use_sliding_window", True),
    ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen3", "use_sliding_window", True),
    ("qwen3_moe", "attention_bias", True),
    ("qwen3_moe", "hidden_act", "gelu"),
    ("qwen3_moe", "num_experts_per_tok", 1),
    ("glm4", "hidden_act", "gelu"),
    ("glm4_moe", "n_group", 4),
    ("glm4_moe", "norm_topk_prob", False),
    ("glm4_moe", "num_experts_per_tok", 1),
    ("glm4_moe", "n_shared_experts", 0),
    ("llama", "attention_bias", True),
    ("llama", "mlp_bias", True),
    ("phi3", "sliding_window", 2047),
    ("phi3", "hidden_act", "gelu"),
    ("seed_oss", "attention_out_bias", True),
    ("seed_oss", "mlp_bias", True),
    ("smollm3", "use_sliding_window", True),
    ("smollm3", "attention_bias", True),
    ("smollm3", "mlp_bias", True),
    ("smollm3", "no_rope_layers", [1]),
    ("deepseek_v3", "attention_bias", True),
    ("deepseek_v3", "scoring_func", "softmax"),
    ("deepseek_v3", "topk_group", 1),
    ("deepseek_v3", "n_group", 3),
    ("deepseek_v3", "n_group", 8),
    ("deepseek_v3", "num_experts_per_tok", 5),
    ("deepseek_v3", "moe_layer_freq", 2),
    ("glm4_moe_lite", "attention_bias", True),
    ("glm4_moe_lite", "mlp_layer_types", ["dense", "dense", "sparse"]),
    ("glm4_moe_lite", "mlp_layer_types", ["sparse", "sparse", "sparse"]),
    ("qwen3_5", "attention_bias", True),
    ("qwen3_5", "layer_types", ["sliding_attention"]),
    ("qwen3_5_moe", "hidden_act", "gelu"),
    ("qwen3_5_moe", "num_experts_per_tok", 1),
    ("qwen3_next", "attention_bias", True),
    ("qwen3_next", "mlp_only_layers", [0, 1, 2]),
    ("qwen3_next", "num_experts_per_tok", 1),
]


@pytest.mark.parametrize(("family", "key", "value"), REFUSED)
def test_a_variant_that_would_be_another_model_is_refused(family: str, key: str, value: Any) -> None:
    spec = FAMILIES[family]
    with pytest.raises(
        ConfigError, match=f"{re.escape(f'{key} = {value!r}')} is not supported by the {family} family"
    ):
        megatron_model(spec).transformer_config({**spec.tiny(), key: value})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_angles_that_are_scaled_otherwise_are_refused(family: str) -> None:
    spec = FAMILIES[family]
    scaled: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    if megatron_model(spec).local_rotary is not None:
        scaled = {"full_attention": scaled}
    hf = {**spec.tiny(), "rope_parameters": scaled}
    with pytest.raises(
        ConfigError, match="'longrope' of the checkpoint is not supported; supported: 'default'"
    ):
        megatron_model(spec).rotary(hf, torch.arange(3))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_key_that_is_left_out_has_the_default_of_transformers(family: str) -> None:
    """Or the family asks for it."""
    assert differing_defaults(FAMILIES[family]) == []


OLD = {
    "olmo3": {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "mistral": {"rope_theta": 1e6},
    "qwen2": {"rope_theta": 1e6},
    "phi3": {"rope_theta": 2.5e5, "partial_rotary_factor": 0.5},
    "seed_oss": {"rope_theta": 1e7},
    "smollm3": {"rope_theta": 5e6},
    "qwen3": {"rope_theta": 1e6},
    "qwen3_next": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "glm4": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "glm4_moe": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {"rope_theta": 1e4},
    "deepseek_v3": {
        "rope_theta": 1e4,
        "rope_scaling": {
            **{"type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
            **{"mscale_all_dim": 0.8, "original_max_position_embeddings": 64},
        },
    },
    "llama": {
        "rope_theta": 1e4,
        "rope_scaling": {
            **{"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 64,
        },
    },
}
"""How transformers 4 wrote the angles of the tiny models."""


@pytest.mark.parametrize("family", OLD)
def test_angles_are_read_from_configs_of_transformers_4(family: str) -> None:
    spec = FAMILIES[family]
    new = spec.tiny()
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | OLD[family]
    positions = torch.arange(200)
    for one, other in zip(rotary_of(spec, old, positions), rotary_of(spec, new, positions), strict=True):
        assert torch.equal(one, other)
