"""Whole runs on the FSDP engine, of a model that no family knows: from start to end, resumed, dry."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
)

from anygauge.cli import main
from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import save_random
from anygauge_tests.observer import Rewarding, run_with_observer
from anygauge_tests.recipe import tiny_recipe

STEPS = 3


SIZES: dict[str, Any] = {
    "vocab_size": 18,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 16,
    "bos_token_id": None,
    "eos_token_id": 17,
}
PHI = PhiConfig(**SIZES)
"""Its output layer has a bias."""
GPT_OSS = GptOssConfig(
    **SIZES,
    head_dim=8,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=3,
    layer_types=["sliding_attention", "full_attention"],
)
"""It has experts, a window and sinks."""


def recipe(directory: Path, config: Any = PHI, **keys: Any) -> Path:
    """Write a recipe of a tiny model without a family of ours."""
    path = tiny_recipe(
        directory,
        run__steps=STEPS,
        train__engine="fsdp",
        train__optimizer_steps=2,
        algorithm__kl_coef=0.01,
        placement__train_workers=2,
        **keys,
    )
    shutil.move(directory / "model", directory / "qwen3")
    save_random(AutoModelForCausalLM, config, directory / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / "qwen3" / name, directory / "model" / name)
    return path


@pytest.mark.usefixtures("forked_actors")
@pytest.mark.parametrize(
    "config", [PHI, pytest.param(GPT_OSS, marks=pytest.mark.fsdp)], ids=["phi", "gpt-oss"]
)
def test_a_run_from_start_to_end(tmp_path: Path, config: Any) -> None:
    observer = Rewarding()
    run_with_observer(recipe(tmp_path, config, reward__function="digits"), observer)
    assert len(observer.metrics) == STEPS
    for metrics in observer.metrics:
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-4
    (export,) = (tmp_path / "run").rglob("model.safetensors.index.json")
    model, info = AutoModelForCausalLM.from_pretrained(export.parent, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert type(model.config) is type(config)


FOUR_LINES: dict[str, Any] = {
    "gemma-3": Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        num_key_value_heads=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2.5": Qwen2Config(**SIZES, num_key_value_heads=2),
    "gpt-oss": GPT_OSS,
    "smollm2": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
}
SMALL = {
    "run.steps": 2,
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 4,
    "placement.launcher": "local",
    "placement.threads_per_worker": 1,
}


@pytest.mark.usefixtures("forked_actors")
@pytest.mark.parametrize(
    ("name", "engine"),
    [*((name, "fsdp") for name in FOUR_LINES), ("gemma-3", "megatron"), ("gpt-oss", "megatron")],
)
def test_a_config_of_four_lines_trains(tmp_path: Path, name: str, engine: str) -> None:
    recipe(tmp_path, FOUR_LINES[name])
    path = tmp_path / "four.toml"
    path.write_text(
        f'model.path = "{tmp_path}/model"\n'
        f'data.train = ["{tmp_path}/data.jsonl"]\n'
        'reward.function = "digits"\n'
        f'train.engine = "{engine}"\n'
    )
    observer = Rewarding()
    run_with_observer(path, observer, {**SMALL, "run.directory": tmp_path, "data.cache": tmp_path / "cache"})
    assert len(observer.metrics) == 2
    for metrics in observer.metrics:
        assert metrics["train/grad_norm"] > 0
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_a_dry_run_says_by_whom_the_model_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path)
    assert main(["train", str(path), "--dry-run", "--backend", "cpu"]) == 0
    error = capsys.readouterr().err
    assert "model: PhiForCausalLM, built by transformers (train.engine = 'fsdp')" in error
    assert "PhiForCausalLM is supported by train.engine = 'fsdp' (family transformers)" in error


def test_layouts_that_the_engine_lacks_are_refused(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    keys = {
        "train.parallel.tensor": 2,
        "train.recompute": "selective",
        "train.freeze": ["vision"],
        "train.megatron": {"overlap_grad_reduce": True},
    }
    with pytest.raises(Exception, match="only shards over data-parallel ranks") as caught:
        load_config(path, list(keys.items()), backend="cpu", plugins=load_plugins())
    for name in keys:
        assert name in str(caught.value)
