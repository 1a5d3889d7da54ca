"""Families of text models, and what they declare of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig

from anygauge.plugins import load_plugins
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec, transformers_model

__all__ = ["FAMILIES", "differing_defaults", "rotary_of"]

FAMILIES = {
    spec.name: spec
    for spec in load_plugins().collect("register_models")
    if "hidden_size" in spec.tiny() and transformers_model(spec) is None
}
"""Those whose models may have text alone, and whose class transformers has."""


def differing_defaults(spec: ModelSpec) -> list[str]:
    """Return the keys that make another model when they are left out than with transformers' defaults."""
    keys = set(AutoConfig.for_model(**spec.tiny()).to_dict()) | {"head_dim"}
    return [key for key in sorted(keys) if _differs_without(spec, key)]


def _differs_without(spec: ModelSpec, key: str) -> bool:
    """Return whether a model without a key is another one than that with the default of transformers."""
    rest = {name: value for name, value in spec.tiny().items() if name != key}
    if (found := _declared(spec, rest)) == "asks":
        return False
    defaults = AutoConfig.for_model(**{"model_type": spec.tiny()["model_type"], **rest}).to_dict()
    # Where a config has no size of a head, models make it of these.
    quotient = {"head_dim": defaults["hidden_size"] // defaults["num_attention_heads"]}
    return found != _declared(spec, {**rest, key: {**quotient, **defaults}[key]})


def _declared(spec: ModelSpec, hf: Mapping[str, Any]) -> list[Any] | str:
    """Return all that a family says about a model, or what it does instead."""
    try:
        angles = [each.tolist() for each in rotary_of(spec, hf, torch.arange(3))]
        options = [
            megatron_model(spec).transformer_config(hf),
            spec.model_options(hf),
            spec.unused_weights(hf),
        ]
        return [
            *angles,
            *options,
            list(megatron_model(spec).layers(hf)),
            megatron_model(spec).weight_rules(hf),
            spec.flops_per_token(hf, 10),
        ]
    except KeyError:
        return "asks"
    except ConfigError:
        return "refuses"


def rotary_of(spec: ModelSpec, hf: Mapping[str, Any], positions: torch.Tensor) -> list[torch.Tensor]:
    """Return cosines and sines, those of local layers too."""
    model = megatron_model(spec)
    rotaries = (model.rotary, *(() if model.local_rotary is None else (model.local_rotary,)))
    return [each for rotary in rotaries for each in rotary(hf, positions)]
