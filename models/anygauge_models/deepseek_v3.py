"""DeepSeek-V3, latent attention and a mixture of experts behind some dense layers (https://arxiv.org/abs/2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anygauge_hooks.megatron import MegatronModel, WeightRule
from anygauge_models.architecture import (
    Variant,
    decoder_config,
    expert_config,
    make_family,
    next_token_layers,
    refuse_variants,
    single_expert,
    sparse_flops,
    with_experts,
)
from anygauge_models.rope import half_rotary, magnitude, rope_parameters, yarn_factor
from anygauge_models.rules import (
    decoder_rules,
    dense_mlp,
    expert_mlp,
    layer_rule,
    norm_before_attention,
    shared_expert,
)

__all__ = [
    "DEEPSEEK_V3",
    "MODEL",
    "expert_layers",
    "flops_per_token",
    "latent_config",
    "mixture_config",
    "mixture_flops",
    "mixture_rules",
]


def expert_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose MLP is a mixture of experts: all but the first ones."""
    return tuple(range(hf["first_k_dense_replace"], hf["num_hidden_layers"]))


def expert_groups(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Return into how many groups the experts are divided, and to how many of them a token goes."""
    return hf["n_group"] or 1, hf["topk_group"] or 1


def query_size(hf: Mapping[str, Any]) -> int:
    """Return the size of a query or key head."""
    return int(hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])


def shared_width(hf: Mapping[str, Any]) -> int:
    """Return the rows of the gate and of the up of the expert that every token goes to."""
    return int(hf["moe_intermediate_size"] * hf.get("n_shared_experts", 1))


def softmax_scale(hf: Mapping[str, Any]) -> float:
    """Return what multiplies the scores; a lengthened context makes it larger.

    https://arxiv.org/abs/2309.00071 section 3.4, with the weight that the checkpoint gives it.
    """
    scale = query_size(hf) ** -0.5
    parameters = rope_parameters(hf)
    every = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "default" or not every:
        return float(scale)
    return float(scale * magnitude(yarn_factor(hf), every) ** 2)


def transformer_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``MLATransformerConfig`` that the architecture fixes.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    return latent_config(hf, "deepseek_v3")


def latent_config(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return :func:`transformer_config` of a family with the same layers.

    :raises ConfigError: The checkpoint uses a variant that is not implemented.
    """
    refuse_variants(hf, family, _refused(hf))
    groups, chosen = expert_groups(hf)
    return decoder_config(
        hf,
        heads=hf["num_attention_heads"],
        groups=hf["num_attention_heads"],
        size=hf["v_head_dim"],
        multi_latent_attention=False,  # says that positions are Megatron's; the core attention applies them
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        softmax_scale=softmax_scale(hf),
        rotary_interleaved=bool(hf.get("rope_interleave", True)),
        moe_router_num_groups=groups if groups > 1 else None,
        moe_router_group_topk=chosen if groups > 1 else None,
        **mixture_config(hf, scaling=2.5),
    )


def mixture_config(hf: Mapping[str, Any], *, scaling: float) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` of experts that sigmoids choose, beside a shared one.

    :param scaling: Factor of their weights, where the checkpoint does not say.
    """
    return expert_config(
        experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=hf.get("routed_scaling_factor", scaling),
        moe_shared_expert_intermediate_size=shared_width(hf),
    )


def _refused(hf: Mapping[str, Any]) -> list[Variant]:
    groups, chosen = expert_groups(hf)
    experts, top_k = hf["n_routed_experts"], hf["num_experts_per_tok"]
    group_size = experts // groups
    # A group is rated by its best two experts; Megatron takes this many, and the family always two.
    rated_by = top_k // chosen
    return [
        ("attention_bias", bool(hf.get("attention_bias", False)), "projections without biases"),
        ("scoring_func", hf.get("scoring_func", "sigmoid") != "sigmoid", "sigmoid"),
        ("topk_method", hf.get("topk_method", "noaux_tc") != "noaux_tc", "noaux_tc"),
        ("moe_layer_freq", hf.get("moe_layer_freq", 1) != 1, "experts in every layer after the dense ones"),
        ("norm_topk_prob", not hf.get("norm_topk_prob", True), "true"),
        single_expert(hf),
        (
            "n_group",
            experts % groups != 0 or group_size < 2,
            f"equal parts of {experts} experts, two in each at least",
        ),
        ("topk_group", groups > 1 and (chosen > groups or rated_by != 2), "two experts per chosen group"),
        ("num_experts_per_tok", groups > 1 and top_k > chosen * group_size, f"at most {chosen * group_size}"),
        ("n_shared_experts", not hf.get("n_shared_experts", 1), "a shared expert"),
        ("first_k_dense_replace", not expert_layers(hf), "a layer of experts behind the dense ones"),
    ]


def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Return the floating-point operations of a forward pass per token, causal attention counted once."""
    return mixture_flops(hf, _attention_flops(hf, sequence_length))


def mixture_flops(hf: Mapping[str, Any], attention: float) -> float:
    """Return the floating-point operations per token, given those of the attention of one layer."""
    width = hf["num_experts_per_tok"] * hf["moe_intermediate_size"] + shared_width(hf)
    return sparse_flops(
        hf, attention, sparse=len(expert_layers(hf)), width=width, experts=hf["n_routed_experts"]
    )


def _attention_flops(hf: Mapping[str, Any], sequence_length: int) -> float:
    hidden, heads, rank = hf["hidden_size"], hf["num_attention_heads"], hf["q_lora_rank"]
    queries, values = heads * query_size(hf), heads * hf["v_head_dim"]
    query = hidden * queries if rank is None else rank * (hidden + queries)
    down = hidden * (hf["kv_lora_rank"] + hf["qk_rope_head_dim"])
    up = hf["kv_lora_rank"] * (heads * hf["qk_nope_head_dim"] + values)
    return float(2 * (query + down + up + values * hidden) + (queries + values) * sequence_length)


def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return one rule for each canonical tensor."""
    return mixture_rules(hf, _attention(hf))


def mixture_rules(hf: Mapping[str, Any], attention: Sequence[WeightRule]) -> list[WeightRule]:
    """Return the rules of a decoder with these of attention."""
    sparse = expert_layers(hf)
    experts = expert_mlp(
        experts=hf["n_routed_experts"],
        width=hf["moe_intermediate_size"],
        bias="gate.e_score_correction_bias",
        layers=sparse,
    )
    dense = dense_mlp(hf["intermediate_size"], layers=tuple(range(hf["num_hidden_layers"] - len(sparse))))
    shared = shared_expert("shared_experts", shared_width(hf), layers=sparse)
    return decoder_rules(hf, [*attention, *dense, *experts, *shared])


def _attention(hf: Mapping[str, Any]) -> list[WeightRule]:
    """Return the rules of latent attention; what makes latents is on every rank."""
    if hf["q_lora_rank"] is None:
        queries = [layer_rule("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", split_dim=0)]
    else:
        queries = [
            _down("q", "self_attn.q_a_proj"),
            *_up("q", "self_attn.q_a_layernorm", "self_attn.q_b_proj"),
        ]
    return [
        norm_before_attention("input_layernorm.weight"),
        *queries,
        _down("kv", "self_attn.kv_a_proj_with_mqa"),
        *_up("kv", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj"),
        layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", split_dim=1),
    ]


def _down(name: str, hf: str) -> WeightRule:
    return layer_rule(f"self_attention.linear_{name}_down_proj.weight", f"{hf}.weight")


def _up(name: str, norm: str, linear: str) -> list[WeightRule]:
    canonical = f"self_attention.linear_{name}_up_proj"
    return [
        layer_rule(f"{canonical}.layer_norm_weight", f"{norm}.weight"),
        layer_rule(f"{canonical}.weight", f"{linear}.weight", split_dim=0),
    ]


# A part of each head turns, in pairs of neighbors. `rotary_interleaved` lets attention move them into halves.
rotary = half_rotary(lambda hf: int(hf["qk_rope_head_dim"]))


MODEL = MegatronModel(
    transformer_config=transformer_config,
    weight_rules=weight_rules,
    rotary=rotary,
    layers=lambda hf: with_experts(hf, expert_layers(hf), attention="latent"),
)
DEEPSEEK_V3 = make_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    model=MODEL,
    flops_per_token=flops_per_token,
    unused_weights=next_token_layers,
    defaults={
        "rms_norm_eps": 1e-6,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "max_position_embeddings": 4096,
    },
)
