"""Description of the model that the engine would build from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import megatron_model

if TYPE_CHECKING:
    from anygauge_hooks.models import ModelSpec

__all__ = ["describe_model"]

_TRAINING = ("init_method_std", "moe_aux_loss_coeff", "moe_router_bias_update_rate")
"""Fields of ``TransformerConfig`` that say how a model is trained, and nothing of what it computes."""
_POSITIONS = (1, 30, 1_000, 30_000)
"""Positions whose rotary angles are compared: the first few tokens, and where scaled angles differ most."""


def describe_model(spec: ModelSpec, hf: Mapping[str, Any]) -> object:
    """Return what the engine computes with given weights, read as far as a build would read it.

    :raises ConfigError: The family has no entry of the engine or refuses the config, or its numbers do not
        fit each other.
    """
    import torch

    model = megatron_model(spec)
    architecture, layers = model.transformer_config(hf), list(model.layers(hf))
    if problems := [*_misfits(architecture), *_depth(architecture, len(layers))]:
        raise ConfigError("; ".join(problems))
    rotaries = [each for each in (model.rotary, model.local_rotary) if each is not None]
    angles = [each.tolist() for rotary in rotaries for each in rotary(hf, torch.tensor(_POSITIONS))]
    scale = 1.0 if model.embedding_scale is None else model.embedding_scale(hf)
    model.weight_rules(hf)
    fields = {name: value for name, value in architecture.items() if name not in _TRAINING}
    return fields, layers, angles, scale


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
