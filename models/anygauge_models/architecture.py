"""The parts of a Hugging Face config that families share: fields of Megatron's config, refusals, FLOPs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import MEGATRON, LayerKind, MegatronModel, megatron_model, with_megatron
from anygauge_hooks.models import ModelSpec, text_config

__all__ = [
    "Variant",
    "attention_flops",
    "attention_sizes",
    "decoder_config",
    "dense_flops",
    "expert_config",
    "gated_mlp_flops",
    "head_size",
    "layer_windows",
    "make_family",
    "model_options",
    "next_token_layers",
    "refuse_variants",
    "single_expert",
    "sliding_windows",
    "sparse_flops",
    "tiny_config",
    "unsupported",
    "windowed_flops",
    "with_config",
    "with_experts",
]

Variant = tuple[str, bool, str]
"""A key of the config, whether its value is one that the family has not, and what it needs."""


def decoder_config(
    hf: Mapping[str, Any], *, heads: int, groups: int, size: int, **fields: Any
) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` of a decoder with RMS norms and gated MLPs without biases.

    :param heads: Query heads.
    :param groups: Key and value heads.
    :param size: Size of a head.
    :param fields: Fields that differ.
    """
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": size,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": False,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "attention_dropout": 0.0,  # a policy's ratio would be noise with it
        "hidden_dropout": 0.0,
        "init_method_std": hf.get("initializer_range", 0.02),
        **fields,
    }


def expert_config(*, experts: int, top_k: int, width: int, **fields: Any) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig`` of a mixture of experts without dropped tokens.

    :param experts: Their number.
    :param top_k: Experts of a token.
    :param width: Rows of an expert's gate and of its up.
    :param fields: Fields that differ.
    """
    return {
        "num_moe_experts": experts,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": width,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # the policy's experts stay those that it sampled with
        **fields,
    }


def refuse_variants(hf: Mapping[str, Any], family: str, variants: Iterable[Variant]) -> None:
    """Refuse what would silently be another model; MLPs have SiLU in every family.

    :raises ConfigError: The checkpoint has one.
    """
    activation = ("hidden_act", hf.get("hidden_act", "silu") != "silu", "silu")
    for key, is_variant, needs in (activation, *variants):
        if is_variant:
            raise unsupported(family, key, hf.get(key), needs)


def unsupported(
    family: str, key: str, value: object, needs: object, file: str = "config.json"
) -> ConfigError:
    """Return the error of a checkpoint that a file says to be of another model."""
    return ConfigError(
        f"The checkpoint's {key} = {value!r} is not supported by the {family} family, which needs {needs}.",
        hint=f"No published model of the {family} family has it; check {file}.",
    )


def single_expert(hf: Mapping[str, Any]) -> Variant:
    """Return the variant, for routers whose weights sum to 1: that of a single expert always is 1."""
    return "num_experts_per_tok", hf["num_experts_per_tok"] < 2, "at least 2"


def sliding_windows(hf: Mapping[str, Any]) -> list[Variant]:
    """Return the variants, in Qwen's keys, whose attention does not reach back to the first token."""
    has_window = any(kind != "full_attention" for kind in hf.get("layer_types") or ())
    return [
        ("layer_types", has_window, "full_attention in every layer"),
        ("use_sliding_window", bool(hf.get("use_sliding_window")), "false"),
    ]


def layer_windows(hf: Mapping[str, Any], every: int) -> list[int | None]:
    """Return how many of the last tokens a token sees in each layer, ``None`` for all.

    :param every: Each layer whose number this divides sees all, where the config has no ``layer_types``.
    """
    kinds = hf.get("layer_types") or [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(hf["num_hidden_layers"])
    ]
    return [hf["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]


def next_token_layers(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the layers that predict tokens after the next, which are behind all others."""
    count = hf.get("num_nextn_predict_layers", 1) or 0
    return tuple(f"model.layers.{hf['num_hidden_layers'] + index}." for index in range(count))


def make_family(
    name: str,
    *architectures: str,
    model: MegatronModel,
    flops_per_token: Callable[[Mapping[str, Any], int], float],
    defaults: Mapping[str, Any],
    tiny: Callable[[], Mapping[str, Any]] | None = None,
    **fields: Any,
) -> ModelSpec:
    """Return a family that reads a config as transformers does.

    Its text models may also be parts of larger ones, as ``text_config`` in theirs.

    :param defaults: Defaults of transformers, for keys that a config may lack. The shapes of weights are not
        in them: a config without ``hidden_size`` is a damaged one. The number of key and value heads is,
        since there were models before there were groups.
    :param tiny: Returns the config of its tiny model; ``None`` takes that of :func:`tiny_config`.
    :param fields: Other fields of its spec.
    """
    spec = ModelSpec(
        name=name,
        architectures=architectures,
        model_options=model_options,
        flops_per_token=flops_per_token,
        tiny=tiny or tiny_config(name),
        engines={MEGATRON: model},
        **fields,
    )
    return with_config(spec, lambda hf: {**defaults, **text_config(hf)})


def with_config(spec: ModelSpec, read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> ModelSpec:
    """Return a family whose functions take what ``read`` makes of a Hugging Face config; media's do not."""

    def reading(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda hf, *rest: function(read(hf), *rest)

    model = megatron_model(spec)
    if model.local_rotary is not None:
        model = replace(model, local_rotary=reading(model.local_rotary))
    if model.embedding_scale is not None:
        model = replace(model, embedding_scale=reading(model.embedding_scale))
    model = replace(
        model,
        transformer_config=reading(model.transformer_config),
        weight_rules=reading(model.weight_rules),
        rotary=reading(model.rotary),
        layers=reading(model.layers),
    )
    return replace(
        with_megatron(spec, model),
        model_options=reading(spec.model_options),
        unused_weights=reading(spec.unused_weights),
        carried_weights=reading(spec.carried_weights),
        flops_per_token=reading(spec.flops_per_token),
        read_config=reading(spec.read_config),
    )


def tiny_config(family: str) -> Callable[[], dict[str, Any]]:
    """Return a function that reads ``tiny/FAMILY.json``: a config that trains on a laptop in seconds."""
    path = Path(__file__).parent / "tiny" / f"{family}.json"
    return lambda: dict(json.loads(path.read_text(encoding="utf-8")))


def model_options(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return vocabulary size, longest sequence, and whether the embeddings are tied."""
    return {
        "vocab_size": hf["vocab_size"],
        "max_sequence_length": hf["max_position_embeddings"],
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
    }


def attention_sizes(hf: Mapping[str, Any], head_dim: int) -> dict[str, int]:
    """Return the number of query heads, that of key and value heads, and the size of a head."""
    heads = hf["num_attention_heads"]
    return {"heads": heads, "groups": hf["num_key_value_heads"] or heads, "size": head_dim}


def head_size(hf: Mapping[str, Any], default: int | None = None) -> int:
    """Return the size of a head.

    :param default: Size in the family in transformers; without one a head has its share of the hidden size.
    """
    return int(hf.get("head_dim") or default or hf["hidden_size"] // hf["num_attention_heads"])


def with_experts(hf: Mapping[str, Any], sparse: Collection[int], **kind: Any) -> list[LayerKind]:
    """Return the kinds of layers that are alike, but that some of them have experts.

    :param sparse: Numbers of the layers that have.
    :param kind: Other properties of the layers.
    """
    layers = range(hf["num_hidden_layers"])
    return [LayerKind(mlp="moe" if layer in sparse else "dense", **kind) for layer in layers]


def dense_flops(
    hf: Mapping[str, Any], sequence_length: int, windows: Sequence[int | None] = (None,), **sizes: int
) -> float:
    """Return the floating-point operations per token of a decoder without experts.

    :param windows: Its :func:`layer_windows`.
    :param sizes: Its :func:`attention_sizes`.
    """
    attention = windowed_flops(hf["hidden_size"], windows, **sizes, sequence_length=sequence_length)
    return sparse_flops(hf, attention, sparse=0, width=0, experts=0)


def sparse_flops(hf: Mapping[str, Any], attention: float, *, sparse: int, width: int, experts: int) -> float:
    """Return the floating-point operations per token of a decoder some of whose layers have experts.

    :param attention: Those of the attention of one layer.
    :param sparse: Number of the layers with experts.
    :param width: Rows of the gates of all experts that a token goes to.
    :param experts: Among which it chooses.
    """
    hidden, layers = hf["hidden_size"], hf["num_hidden_layers"]
    routed = sparse * (gated_mlp_flops(hidden, width) + 2 * hidden * experts)
    dense = (layers - sparse) * gated_mlp_flops(hidden, hf["intermediate_size"])
    return float(layers * attention + routed + dense + 2 * hidden * hf["vocab_size"])


def attention_flops(hidden: int, heads: int, groups: int, size: int, sequence_length: int) -> float:
    """Return the floating-point operations per token of attention, the causal half of the scores alone."""
    projections = hidden * size * (2 * heads + 2 * groups)
    return 2.0 * (projections + heads * size * sequence_length)


def windowed_flops(
    hidden: int, windows: Sequence[int | None], *, sequence_length: int, **sizes: int
) -> float:
    """Return the :func:`attention_flops` of the mean layer; a token sees no more than the window."""
    seen = [sequence_length if each is None else min(sequence_length, 2 * each) for each in windows]
    return sum(attention_flops(hidden, **sizes, sequence_length=each) for each in seen) / len(seen)


def gated_mlp_flops(hidden: int, width: int) -> float:
    """Return the floating-point operations per token of a gated MLP."""
    return 2.0 * 3 * hidden * width
