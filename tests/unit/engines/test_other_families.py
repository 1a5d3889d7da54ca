"""Families that another package registers: layers and models of their own, and fields that nobody honors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3ForCausalLM

from anygauge.plugins import load_plugins
from anygauge.testing.model_numbers import batch_of
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.megatron import LayerKind, megatron_model, with_megatron
from anygauge_hooks.models import ModelSpec
from anygauge_tests.engine_config import engine_config

ROOT = Path(__file__).parents[3]
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
        config = engine_config(path, train=train)
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
def test_a_field_that_no_module_honors_is_refused(make_engine: MakeEngine, fields: dict[str, Any]) -> None:
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


def test_layers_of_a_familys_own_may_honor_what_ours_do_not(make_engine: MakeEngine) -> None:
    family = with_fields(window_size=(4, 0), activation_func=F.gelu)
    model = replace(
        megatron_model(family), layers=lambda hf: [LayerKind(build=own_layer)] * hf["num_hidden_layers"]
    )
    transformer = make_engine(with_megatron(family, model)).policy.options.transformer
    assert transformer.window_size == (4, 0)
    assert transformer.activation_func is F.gelu


def test_the_layer_of_the_guide_computes_what_it_says(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The guide's parallel layer, against transformers' modules put together in the same way."""
    guide = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"`anygauge_parallel\.py`:\n\n```python\n(.*?)```", guide, re.DOTALL)
    package: dict[str, Any] = {"__name__": "anygauge_parallel"}
    exec(text, package)
    (family,) = package["register_models"]()
    engine = make_engine(replace(family, architectures=(ARCHITECTURE,)), dtype="float32")
    reference = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for layer in reference.model.layers:
        layer.forward = partial(parallel, layer)
    sequences = [[20, 3, 41, 7, 55, 12, 30], [9, 60, 2]]
    expected = []
    for tokens in sequences:
        log_probs = reference(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        expected.append(log_probs.gather(1, torch.tensor(tokens)[1:, None])[:, 0])
    actual = engine.log_probs(batch_of(sequences), temperature=1.0)
    torch.testing.assert_close(actual, torch.cat(expected).detach(), rtol=0, atol=1e-5)


def parallel(layer: Any, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden), **options)
    result: torch.Tensor = hidden + attended + layer.mlp(layer.post_attention_layernorm(hidden))
    return result


def own_layer(provider: Any, config: Any) -> Any:
    from anygauge.engines.megatron.layers.spec import layer_spec

    return layer_spec(provider, LayerKind(), config)
