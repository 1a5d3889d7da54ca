"""FP8 checkpoints are written in bfloat16."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from anygauge.cli import main
from anygauge.engines import dequantize as module
from anygauge.engines.dequantize import dequantize, open_unquantized, to_bfloat16
from anygauge.hub.quantization import fp8_block
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.errors import CheckpointError
from anygauge_tests.fp8 import BLOCK, FP8, Scale, expanded, quantized


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    tiny_qwen3(directory, hidden=24, heads=2, head_dim=12, mlp=36, layers=1, vocab_size=32)
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def test_a_weight_is_the_product_of_its_numbers_and_the_scale_of_their_block() -> None:
    weight = torch.linspace(-400, 400, 20 * 40).view(20, 40).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3) + 0.5
    found = dequantize(weight, scale, BLOCK, weight.shape)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (weight.float() * expanded(scale, weight.shape)).bfloat16())


@pytest.mark.parametrize(("rows", "shape"), [(20, ()), (8, (1,)), (8, (1, 1))])
def test_one_number_may_be_of_a_whole_weight(rows: int, shape: tuple[int, ...]) -> None:
    weight = torch.randn(rows, 16).to(torch.float8_e4m3fn)
    found = dequantize(weight, torch.full(shape, 0.7), BLOCK, weight.shape)
    assert torch.equal(found, (weight.float() * 0.7).bfloat16())


@pytest.mark.parametrize("shape", [(20,), (20, 1)])
def test_scales_of_rows_may_have_one_dimension_less(shape: tuple[int, ...]) -> None:
    weight, scale = torch.randn(20, 20).to(torch.float8_e4m3fn), torch.rand(20)
    found = dequantize(weight, scale.view(shape), None, weight.shape)
    assert torch.equal(found, (weight.float() * scale[:, None]).bfloat16())


def test_it_is_that_of_transformers_where_blocks_divide_the_weight() -> None:
    weight = torch.randn(3, 16, 32).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, 2)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(dequantize(weight, scale, BLOCK, weight.shape), theirs)


@pytest.mark.parametrize(
    "index",
    [(), (2,), (1, slice(3, 11)), (slice(1, 3), slice(None), slice(15, 33)), (0, slice(7, 9), slice(17, 39))],
)
def test_a_part_is_that_of_the_whole(index: tuple[Any, ...]) -> None:
    weight = torch.randn(3, 20, 40).to(torch.float8_e4m3fn)
    for scale, block in ((torch.rand(3, 3, 3), BLOCK), (torch.rand(3, 20), None), (torch.rand(1), None)):
        whole = dequantize(weight, scale, block, weight.shape)
        assert torch.equal(dequantize(weight[index], scale, block, weight.shape, index), whole[index])


def test_a_published_checkpoint_becomes_a_model(model: Path, tmp_path: Path) -> None:
    source = quantized(model)
    told: list[tuple[int, int]] = []
    counts = to_bfloat16(source, tmp_path / "out", check=True, tell=lambda *at: told.append(at))
    original, stored = load_file(model / "model.safetensors"), load_file(source / "model.safetensors")
    written = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert counts == {"dequantized": 7, "left out": 0}
    assert written.keys() == original.keys()
    assert told[: len(original)] == [(i, len(original)) for i in range(1, len(original) + 1)]
    for name, weight in written.items():
        if name + "_scale_inv" in stored:
            whole = expanded(stored[name + "_scale_inv"].float(), weight.shape)
            assert torch.equal(weight, (stored[name].float() * whole).bfloat16())
            assert torch.allclose(weight.float(), original[name].float(), rtol=0.07, atol=1e-4)
        else:
            assert torch.equal(weight, original[name])
            assert weight.dtype == original[name].dtype
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["num_nextn_predict_layers"] == 1, "its tensors are there too"
    assert config["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize(
    "scale",
    [lambda weight: weight.abs().amax(1, keepdim=True) / 448, lambda weight: weight.abs().max()[None] / 448],
    ids=["rows", "one"],
)
def test_scales_of_rows_and_of_whole_weights(scale: Scale, model: Path, tmp_path: Path) -> None:
    source = quantized(
        model, end="_scale", scale=scale, quantization_config={"quant_method": "compressed-tensors"}
    )
    unused = ("mlp.up_proj.input_scale", "mlp.up_proj.activation_scale", "self_attn.k_scale")
    extra = {f"model.layers.0.{name}": torch.ones(1) for name in unused}
    rewrite(source, lambda weights: weights.update({**extra, "rows": torch.arange(3)}))
    counts = to_bfloat16(source, tmp_path / "out")
    assert counts == {"dequantized": 7, "left out": 3}
    original = {**load_file(model / "model.safetensors"), "rows": torch.arange(3)}
    for name, weight in load_file(tmp_path / "out" / "model-00001-of-00001.safetensors").items():
        assert torch.allclose(weight.float(), original[name].float(), rtol=0.07, atol=1e-4)


NAME = "model.layers.0.mlp.up_proj.weight"
CONFIGS: list[tuple[Mapping[str, Any] | None, str]] = [
    (None, "quant_method is None, and must be one of fp8, compressed-tensors"),
    ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
    ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\], not two numbers above 0"),
    ({**FP8, "weight_block_size": [0, 1]}, r"weight_block_size is \[0, 1\]"),
    ({**FP8, "weight_block_size": [8, 8]}, r"scales of blocks of \[8, 8\]"),
]


@pytest.mark.parametrize(("config", "text"), CONFIGS)
def test_configs_that_are_refused(
    config: Mapping[str, Any] | None, text: str, model: Path, tmp_path: Path
) -> None:
    source = quantized(model, quantization_config=config)
    with pytest.raises(CheckpointError, match=text):
        to_bfloat16(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


TENSORS: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda weights: weights.pop(NAME + "_scale_inv"), f"no scale of {NAME}, which is torch.float8_e4m3fn"),
    (
        lambda weights: weights.update({NAME + "_scale_inv": torch.full((5, 2), math.inf)}),
        f"{NAME} of shape .36, 24. has scales that are not finite",
    ),
    (
        lambda weights: weights.update({NAME + "_scale_inv": torch.ones(5)}),
        f"{NAME} of shape .36, 24. has",
    ),
    (
        lambda weights: weights.update({NAME + "_scale_inv": torch.ones(1, 1)}),
        r"has \(1, 1\) scales of blocks of \[8, 16\], and not \(5, 2\)",
    ),
    (
        lambda weights: weights.update({"x.weight_packed": torch.ones(2, 2, dtype=torch.int32)}),
        "cannot be dequantized here: x.weight_packed is torch.int32",
    ),
]


@pytest.mark.parametrize(("change", "text"), TENSORS)
def test_tensors_that_are_refused(
    change: Callable[[dict[str, Tensor]], object], text: str, model: Path, tmp_path: Path
) -> None:
    source = quantized(model)
    rewrite(source, change)
    with pytest.raises(CheckpointError, match=text) as caught:
        to_bfloat16(source, tmp_path / "out")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_check_notices_what_was_written_wrong(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = module.compare_weights

    def compare_other(written: Path, weights: Any) -> None:
        path = written / "model-00001-of-00001.safetensors"
        changed = load_file(path)
        changed[NAME][0, 0] += 1
        save_file(changed, path)
        compare(written, weights)

    monkeypatch.setattr(module, "compare_weights", compare_other)
    with pytest.raises(CheckpointError, match=f"has another {NAME} than was written"):
        to_bfloat16(quantized(model), tmp_path / "out", check=True)
    assert not (tmp_path / "out").exists()


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = quantized(model), tmp_path / "out"
    assert main(["convert", "--to-bfloat16", str(source), str(target), "--check"]) == 0
    printed = capsys.readouterr().out
    assert printed == (
        f"dequantized 7 tensors; left out 0 scales of activations\nwrote {target}, read back and compared\n"
    )
    assert main(["convert", "--to-bfloat16", str(source), str(target)]) == 1
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--workers", "2"], ["--model", "x"]])
def test_options_that_have_no_effect_are_refused(option: list[str], model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "--to-bfloat16", str(model), str(tmp_path / "out"), *option])


def grouped(*weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    groups = {f"group_{number}": {"weights": each} for number, each in enumerate(weights)}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups, **more}}


def test_blocks_of_compressed_tensors_and_a_config_inside_another() -> None:
    weights = {"block_structure": [8, 16], "strategy": "block"}
    assert fp8_block(grouped(weights)) == (8, 16)
    assert fp8_block(grouped(weights, {"block_structure": "8x16"})) == (8, 16)
    assert fp8_block(grouped({"num_bits": 8, "type": "float", "strategy": "channel"})) is None
    inside = {"text_config": {"quantization_config": FP8, "mtp_num_hidden_layers": 1, "dtype": "float16"}}
    assert fp8_block(inside) == BLOCK
    heads = module._heads(inside)
    assert heads == {"text_config": {"mtp_num_hidden_layers": 1, "dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (grouped({"num_bits": 4, "type": "int"}), "group_0 has weights of 4 bits and type 'int'"),
        (grouped({"num_bits": 8, "type": "int"}), "type 'int', not 8 and 'float'"),
        (grouped({"block_structure": [8, 8]}, {"block_structure": "8x16"}), "different blocks: 8x16, 8x8"),
        (grouped({"block_structure": [8, 8]}, {}), "different blocks: 8x8, none"),
        (grouped({"block_structure": "8x8x"}), "its block_structure is '8x8x', not two numbers above 0"),
        (grouped({"block_structure": "8x"}), "its block_structure is '8x', not two numbers above 0"),
        (grouped({"block_structure": [0, 8]}), r"its block_structure is \[0, 8\]"),
        (grouped({}, transform_config={"R1": {}}), "transform_config turns weights"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quant_method is 'modelopt'"),
        ({"quantization_config": []}, "quant_method is None"),
    ],
)
def test_formats_that_are_not_understood_are_refused(config: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fp8_block(config)


def test_a_directory_that_is_not_quantized_is_read_as_it_is(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    with open_unquantized(model) as reader:
        assert reader.names == stored.keys()
        assert all(torch.equal(reader(name), tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_both_types_of_8_bits_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    weight, scale = torch.randn(8, 16).to(dtype), torch.tensor([[0.7]])
    save_file({"x.weight": weight, "x.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    with open_unquantized(tmp_path) as reader:
        assert reader.names == {"x.weight"}
        assert torch.equal(reader("x.weight"), (weight.float() * scale).bfloat16())


def test_an_empty_target_is_taken(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    to_bfloat16(quantized(model), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
