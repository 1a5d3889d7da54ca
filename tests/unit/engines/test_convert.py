"""Hugging Face directories to Megatron checkpoints and back, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from anygauge.engines.megatron.convert import hf_to_megatron, megatron_to_hf
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.errors import CheckpointError, WeightMappingError


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_there_and_back_is_the_identity(plugins: Plugins, tmp_path: Path, tied: bool, dtype: str) -> None:
    source = tiny_qwen3(tmp_path / "hf", tied=tied, dtype=dtype, max_shard_size="100KB")
    hf_to_megatron(source, tmp_path / "megatron", plugins)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", plugins)
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].dtype == getattr(torch, dtype) for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(tmp_path / "back").eos_token == "<eos>"


def test_nothing_is_overwritten(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    hf_to_megatron(source, tmp_path / "megatron", plugins)
    for convert, directory in ((hf_to_megatron, source), (megatron_to_hf, tmp_path / "megatron")):
        with pytest.raises(CheckpointError, match="is not empty"):
            convert(directory, tmp_path / "full", plugins)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


def test_a_directory_that_is_no_checkpoint_is_refused(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="no Megatron checkpoint"):
        megatron_to_hf(source, tmp_path / "out", plugins)


def test_a_target_that_cannot_be_made_is_refused_before_the_model_is_built(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("anygauge.engines.megatron.convert.prepare_megatron", None)
    with pytest.raises(CheckpointError, match=r"Cannot convert into .*out: .*Not a directory"):
        hf_to_megatron(source, tmp_path / "file" / "out", plugins)


def test_weights_that_do_not_fit_leave_nothing_behind(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    weights = load_file(source / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMappingError, match=r"model\.norm\.weight"):
        hf_to_megatron(source, tmp_path / "out", plugins)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
