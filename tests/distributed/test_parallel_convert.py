"""Megatron itself loads what ``anygauge convert`` writes, and writes what it reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.engines.megatron.conversion.convert import hf_to_megatron, megatron_to_hf
from anygauge.plugins import load_plugins

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

ACTION = f"{Path(__file__).with_name('convert_cases.py')}:load_and_save"
CASES: list[tuple[str, int, dict[str, int], bool]] = [
    ("qwen3", 1, {}, True),
    ("qwen3", 4, {"tensor": 2, "pipeline": 2}, False),
    ("qwen3_moe", 2, {"expert": 2}, True),
    ("qwen3_moe", 2, {"expert_tensor": 2}, True),
    ("glm4_moe", 1, {}, False),
    ("glm4_moe", 4, {"tensor": 2, "expert": 2}, False),
]
"""With whether Megatron saves layers as one tensor, which it can where all are alike."""
ALIKE = {"decoder_sparse_step": 1, "mlp_only_layers": []}


@pytest.mark.parametrize(("family", "world", "parallel", "stacked"), CASES)
def test_megatron_loads_and_saves_converted_checkpoints(
    crew: Any,
    make_model: Any,
    tmp_path: Path,
    family: str,
    world: int,
    parallel: dict[str, int],
    stacked: bool,
) -> None:
    plugins = load_plugins()
    hf = make_model(family, num_hidden_layers=4, **(ALIKE if stacked else {}))
    hf_to_megatron(hf, tmp_path / "megatron", plugins)
    (tmp_path / "again").mkdir()
    found = crew.run(
        world=world,
        action=ACTION,
        model=str(hf),
        parallel=parallel,
        stacked=stacked,
        source=str(tmp_path / "megatron" / "model"),
        target=str(tmp_path / "again" / "model"),
    )
    expected = load_file(hf / "model.safetensors")
    for rank in found:
        assert_same(rank, expected)
    shutil.copytree(tmp_path / "megatron" / "hf", tmp_path / "again" / "hf")
    megatron_to_hf(tmp_path / "again", tmp_path / "back", plugins)
    (file,) = (tmp_path / "back").glob("*.safetensors")
    assert_same(load_file(file), expected)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
