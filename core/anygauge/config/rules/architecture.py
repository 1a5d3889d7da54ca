"""Check that a family supports the model of a ``config.json``, before anything is built from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import text_config

if TYPE_CHECKING:
    from anygauge_hooks.models import ModelSpec

__all__ = ["read_architecture"]

_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
)
"""Keys that are positive whole numbers in every family that has them; some write null for a default."""


def read_architecture(spec: ModelSpec, hf: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, list[str]]:
    """Return the fields of Megatron's config that a model sets, and the problems of its ``config.json``.

    :returns: ``None`` for the fields where anything is wrong.
    """
    if problems := [*_quantization(hf), *_counts(text_config(hf))]:
        return None, problems
    try:
        model = megatron_model(spec)
        architecture = model.transformer_config(hf)
        problems = [*_misfits(architecture), *_depth(architecture, len(model.layers(hf)))]
        _read_remaining(spec, hf)
    except AnygaugeError as error:
        return None, [f"{error.args[0]} {error.hint}"]
    except KeyError as error:
        return None, [f"its config.json lacks {error}"]
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        return None, [f"its config.json has a bad value: {error}"]
    return None if problems else architecture, problems


def _quantization(hf: Mapping[str, Any]) -> Iterator[str]:
    if (quantization := hf.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        yield (
            f"its config.json has a quantization_config ({method}), and quantised weights cannot be trained: "
            "write it in bfloat16 first, without that key"
        )


def _counts(hf: Mapping[str, Any]) -> Iterator[str]:
    for key in _COUNTS:
        value = hf.get(key)
        if value is not None and (type(value) is not int or value < 1):
            yield f"its config.json has a bad {key}: {value!r} is not a positive integer"


def _misfits(architecture: Mapping[str, Any]) -> Iterator[str]:
    heads, groups = (architecture.get(key) for key in ("num_attention_heads", "num_query_groups"))
    if heads and groups and heads % groups:
        yield f"its config.json has {heads} attention heads, no multiple of its {groups} key and value heads"
    experts, chosen = (architecture.get(key) or 0 for key in ("num_moe_experts", "moe_router_topk"))
    if experts and chosen > experts:
        yield f"its config.json sends each token to {chosen} experts, and has {experts}"


def _depth(architecture: Mapping[str, Any], layers: int) -> Iterator[str]:
    if layers != (count := architecture.get("num_layers", layers)):
        yield f"its config.json describes {layers} layers, and its num_hidden_layers is {count}"


def _read_remaining(spec: ModelSpec, hf: Mapping[str, Any]) -> None:
    """Let the family read all that it needs; angles that it does not have it refuses."""
    import torch

    model = megatron_model(spec)
    model.rotary(hf, torch.zeros(1, dtype=torch.int64))
    model.weight_rules(hf)
    spec.model_options(hf)
    spec.unused_weights(hf)
    spec.flops_per_token(hf, 1)
