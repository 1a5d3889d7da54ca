"""FP8 checkpoints are read in bfloat16 by both train engines, the embedded rollout engine and ``convert``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config

from anygauge.engines.dequantize import to_bfloat16
from anygauge.engines.megatron.conversion.convert import hf_to_megatron, megatron_to_hf
from anygauge.plugins import Plugins, load_plugins
from anygauge.serving.embedded.engine import TransformersEngine
from anygauge.testing.model_check import check_model
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.engine_config import engine_config
from anygauge_tests.fp8 import quantized

ENGINES = ("fsdp", "megatron")
SAMPLE = batches.sample_of([1, 5, 3, 7, 2, 9], 4)


@pytest.fixture(scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return an FP8 directory, whose blocks do not divide its weights, and the same model in bfloat16."""
    root = tmp_path_factory.mktemp("published")
    if getattr(request, "param", "") == "Qwen3":
        tiny_qwen3(root / "model", hidden=24, heads=2, head_dim=12, mlp=36, vocab_size=32, init_std=0.3)
    else:
        _write_deepseek(root / "model")
    source = quantized(root / "model", num_nextn_predict_layers=0)
    to_bfloat16(source, root / "bfloat16")
    return source, root / "bfloat16"


def _write_deepseek(directory: Path) -> None:
    """Write a model with experts of their own, and latent attention."""
    config = DeepseekV3Config(
        **{"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "intermediate_size": 36, "moe_intermediate_size": 20},
        **{
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
        **{"n_group": 2, "topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4},
        **{"qk_nope_head_dim": 6, "v_head_dim": 8, "initializer_range": 0.3, "eos_token_id": 17},
    )
    tiny_tokenizer(directory, alphabet="0123456789+-*/=.")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins) -> Callable[..., Any]:
    def make(path: Path, engine: str, **train: Any) -> Any:
        keys = {"engine": engine, "lr": 0.02, "micro_batch_tokens": 64, **train}
        return plugins.get("register_train_engines", engine).make(engine_config(path, train=keys), context)

    return make


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def log_probs(engine: Any, **options: Any) -> Tensor:
    return torch.cat(list(batches.log_probs(engine, [SAMPLE], temperature=1.0, **options)))


@pytest.mark.parametrize("name", ENGINES)
def test_a_train_engine_has_the_product_of_weights_and_scales(
    make_engine: Callable[..., Any], published: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    source, plain = published
    engine, expected = make_engine(source, name), make_engine(plain, name)
    assert same(dict(engine.weights()), dict(expected.weights()))
    assert torch.equal(before := log_probs(engine), log_probs(expected))
    engine.load_role("reference", str(source))
    assert torch.equal(log_probs(engine, role="reference"), before)
    engine.save_hf(str(tmp_path / "out"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_the_embedded_engine_has_them(published: tuple[Path, Path]) -> None:
    states = [
        TransformersEngine(
            path, dtype=torch.bfloat16, device=torch.device("cpu"), max_batch_tokens=1000
        )._model.state_dict()
        for path in published
    ]
    assert same(*states)


def test_a_megatron_checkpoint_has_them(published: tuple[Path, Path], tmp_path: Path) -> None:
    plugins = load_plugins()
    source, plain = published
    hf_to_megatron(source, tmp_path / "megatron", plugins, check=True)
    assert "quantization_config" not in json.loads((tmp_path / "megatron" / "hf" / "config.json").read_text())
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", plugins, check=True)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in back
    assert back["dtype"] == "bfloat16"
    file = "model-00001-of-00001.safetensors"
    assert same(load_file(tmp_path / "back" / file), load_file(plain / file))


@pytest.mark.parametrize("published", ["Qwen3"], indirect=True)
@pytest.mark.parametrize("name", ["fsdp"])
def test_check_model_compares_them_with_transformers(
    context: WorkerContext, published: tuple[Path, Path], name: str
) -> None:
    plugins = load_plugins()
    config = engine_config(published[0], train={"engine": name, "dtype": "float32", "clip_grad": 0.0})
    rows = list(check_model(config, plugins, replace(context, plugins=plugins), "1+2=3"))
    assert [row.found for row in rows if row.status == "FAIL"] == []
