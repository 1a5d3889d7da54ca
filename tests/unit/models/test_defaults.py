"""Keys that a ``config.json`` may lack: every family takes what transformers takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from anygauge.config.rules.architecture import architecture_hints
from anygauge.plugins import load_plugins
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec, transformers_model

FAMILIES: Mapping[str, ModelSpec] = load_plugins().named("register_models")
MEGATRON = load_plugins().get("register_train_engines", "megatron")
SHAPES = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "n_routed_experts", "num_experts"),
        *("num_experts_per_tok", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("v_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim", "num_local_experts"),
    }
)
"""Keys without which a directory is damaged."""
LEFT_OUT = {("gemma3_multimodal", "vocab_size"), ("gemma3_multimodal", "num_attention_heads")}
"""Shapes that published configs lack all the same, by family."""


def decoder(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    inside: Mapping[str, Any] = hf.get("text_config", hf)
    return inside


def changed(spec: ModelSpec, table: Mapping[str, Any]) -> dict[str, Any]:
    hf = dict(spec.tiny())
    return {**hf, "text_config": table} if "text_config" in hf else dict(table)


def cases(*, shapes: bool) -> list[tuple[str, str]]:
    return [
        (name, key)
        for name, spec in sorted(FAMILIES.items())
        for key in decoder(spec.tiny())
        if key not in ("architectures", "model_type")
        and (key in SHAPES and (name, key) not in LEFT_OUT) == shapes
    ]


def described(spec: ModelSpec, hf: Mapping[str, Any]) -> object:
    if problems := architecture_hints(spec, hf, MEGATRON):
        return problems
    model = megatron_model(spec)
    angles = [each.tolist() for each in model.rotary(hf, torch.tensor((1, 30, 1000)))]
    return model.transformer_config(hf), spec.model_options(hf), list(model.layers(hf)), angles


def transformers_config(spec: ModelSpec, fields: Mapping[str, Any]) -> Any:
    """Return a text model's config with the defaults of transformers."""
    if fields["model_type"] in CONFIG_MAPPING_NAMES:
        return AutoConfig.for_model(**fields)
    own = transformers_model(spec)
    assert own is not None
    with torch.device("meta"):
        return own.build(fields, torch.float32).config


@pytest.mark.parametrize(("family", "key"), cases(shapes=False))
def test_a_missing_key_has_the_value_of_transformers(family: str, key: str) -> None:
    spec = FAMILIES[family]
    table = {name: value for name, value in decoder(spec.tiny()).items() if name != key}
    fields = {name: value for name, value in table.items() if name != "architectures"}
    config = transformers_config(spec, fields)
    missing = described(spec, changed(spec, table))
    if hasattr(config, key):
        assert missing == described(spec, changed(spec, {**table, key: getattr(config, key)}))
    else:
        assert isinstance(missing, tuple), missing


@pytest.mark.parametrize(("family", "key"), cases(shapes=True))
def test_a_shape_that_is_missing_is_named(family: str, key: str) -> None:
    spec = FAMILIES[family]
    table = {name: value for name, value in decoder(spec.tiny()).items() if name != key}
    [problem] = described(spec, changed(spec, table))  # type: ignore[misc]
    assert problem in (f"its config.json lacks {key!r}", "its config.json lacks 'num_local_experts'")
