"""Families that another package registers: layers and models of their own, and fields that nobody honours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import LayerKind, megatron_model, with_megatron
from anygauge_hooks.models import ModelSpec

ARCHITECTURE = "OtherForCausalLM"
MakeEngine = Callable[..., Any]


class Package:
    """A package that registers a family."""

    def __init__(self, family: ModelSpec) -> None:
        self.family = family

    @hookimpl
    def register_models(self) -> list[ModelSpec]:
        return [self.family]


@pytest.fixture
def make_engine(context: WorkerContext, tmp_path: Path) -> MakeEngine:
    """Return a maker of engines of a Qwen3 whose ``config.json`` names the family of another package."""

    def make(family: ModelSpec, **train: Any) -> Any:
        plugins = load_plugins()
        plugins.register(Package(family), "other")
        path = tiny_qwen3(tmp_path / "model", vocab_size=64, init_std=0.2)
        hf = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**hf, "architectures": [ARCHITECTURE]}))
        config = Config.model_validate(
            {
                "run": {"name": "test", "steps": 10},
                "model": {"path": path},
                "data": {"train": []},
                "reward": {"function": "none"},
                "train": train,
            }
        )
        spec = plugins.get("register_train_engines", "megatron")
        return spec.make(config, replace(context, plugins=plugins))

    return make


def qwen3(**changes: Any) -> ModelSpec:
    """Return the family under another name."""
    base: ModelSpec = load_plugins().get("register_models", "qwen3")
    return replace(base, name="other", architectures=(ARCHITECTURE,), **changes)


def with_fields(**fields: Any) -> ModelSpec:
    base = qwen3()
    model = megatron_model(base)
    return with_megatron(
        base, replace(model, transformer_config=lambda hf: {**model.transformer_config(hf), **fields})
    )


DISREGARDED: list[dict[str, Any]] = [
    {"window_size": (4, 0)},
    {"activation_func": F.gelu},
    {"normalization": "LayerNorm"},
    {"softmax_type": "off-by-one"},
    {"attention_dropout": 0.5},
    {"qk_l2_norm": True},
    {"no_rope_freq": 2},
    {"apply_residual_connection_post_layernorm": True},
    {"apply_query_key_layer_scaling": True},
    {"mtp_num_layers": 1},
    {"moe_aux_loss_coeff": 0.001},
]


@pytest.mark.parametrize("fields", DISREGARDED, ids=lambda fields: next(iter(fields)))
def test_a_field_that_no_module_honours_is_refused(make_engine: MakeEngine, fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(ConfigError) as caught:
        make_engine(with_fields(**fields))
    assert f"{name} = {value!r}, not " in str(caught.value)


def test_dropout_that_a_family_does_not_mention_is_none(make_engine: MakeEngine) -> None:
    model = megatron_model(qwen3())
    fields = {"attention_dropout", "hidden_dropout"}

    def without(hf: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in model.transformer_config(hf).items() if name not in fields}

    family = with_megatron(qwen3(), replace(model, transformer_config=without))
    transformer = make_engine(family).policy.options.transformer
    assert {getattr(transformer, name) for name in fields} == {0.0}


def test_layers_of_a_familys_own_may_honour_what_ours_do_not(make_engine: MakeEngine) -> None:
    family = with_fields(window_size=(4, 0), activation_func=F.gelu)
    model = replace(
        megatron_model(family), layers=lambda hf: [LayerKind(build=own_layer)] * hf["num_hidden_layers"]
    )
    transformer = make_engine(with_megatron(family, model)).policy.options.transformer
    assert transformer.window_size == (4, 0)
    assert transformer.activation_func is F.gelu


def own_layer(provider: Any, config: Any) -> Any:
    from anygauge.engines.megatron.layers.spec import layer_spec

    return layer_spec(provider, LayerKind(), config)
