"""Hugging Face directories to Megatron checkpoints and back, to the bit."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
)

from anygauge.engines.megatron.conversion import convert as conversion
from anygauge.engines.megatron.conversion.convert import hf_to_megatron, megatron_to_hf
from anygauge.engines.megatron.conversion.dist_checkpoint import DistReader
from anygauge.engines.megatron.weights.mapping import model_rules
from anygauge.engines.megatron.weights.stacks import straight
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.errors import CheckpointError, UnknownNameError, WeightMappingError
from anygauge_hooks.models import ModelSpec

FAMILIES: dict[str, ModelSpec] = load_plugins().named("register_models")


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def read(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a Hugging Face directory."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def family_directory(spec: ModelSpec, directory: Path) -> Path:
    """Write a Hugging Face directory of a tiny model of random bits, with what it need not have."""
    hf = dict(spec.tiny())
    auto = AutoModelForCausalLM if "hidden_size" in hf else AutoModelForMultimodalLM
    auto.from_config(AutoConfig.for_model(**hf)).save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(-(2**15), 2**15, each.shape, dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for name, each in load_file(directory / "model.safetensors").items()
    }
    source: Any = SimpleNamespace(shape=lambda name: tuple(tensors[name].shape))
    turned = {
        name
        for rule in model_rules(spec, hf)
        for name in rule.hf
        if rule.declared.transposed and straight(source, rule).shape(name) == source.shape(name)
    }
    tensors |= {name: tensors[name].mT.contiguous() for name in turned}  # as it is published
    tensors |= {f"{prefix}extra": torch.zeros(1) for prefix in spec.unused_weights(hf)}
    (directory / "config.json").write_text(json.dumps(hf))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare numbers that may be no numbers."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    "family", [name for name, spec in FAMILIES.items() if spec.tiny()["model_type"] in CONFIG_MAPPING]
)
def test_every_family_there_and_back_is_the_identity(
    family: str, plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "FILE_BYTES", 30_000)
    spec = FAMILIES[family]
    source = family_directory(spec, tmp_path / "hf")
    left_out = hf_to_megatron(source, tmp_path / "megatron", plugins, check=True)
    assert megatron_to_hf(tmp_path / "megatron", tmp_path / "back", plugins, check=True) == {}
    before, after = read(source), read(tmp_path / "back")
    carried = spec.carried_weights(spec.tiny())
    unused = tuple(each for each in spec.unused_weights(spec.tiny()) if each not in carried)
    assert left_out == {prefix: sum(name.startswith(prefix) for name in before) for prefix in unused}
    assert after.keys() == {name for name in before if not name.startswith(unused or ("/",))}
    assert all(same_bits(before[name], after[name]) for name in after)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    said, says = ((each / "config.json").read_text() for each in (source, tmp_path / "back"))
    if json.loads(said).get("num_nextn_predict_layers"):
        changed = {"num_nextn_predict_layers": 0, "dtype": "bfloat16"}
        assert json.loads(says) == json.loads(said) | changed
    elif text := json.loads(said).get("text_config"):
        changed = {"text_config": {**text, "dtype": "bfloat16"}, "dtype": "bfloat16"}
        assert json.loads(says) == json.loads(said) | changed
    else:
        assert says == said


def test_a_checkpoint_of_a_run_of_text_has_no_tower_and_needs_none(plugins: Plugins, tmp_path: Path) -> None:
    source = family_directory(FAMILIES["qwen3_vl"], tmp_path / "hf")
    file = source / "model.safetensors"
    text = {name: tensor for name, tensor in load_file(file).items() if ".visual." not in name}
    save_file(text, file, metadata={"format": "pt"})
    assert hf_to_megatron(source, tmp_path / "megatron", plugins) == {}
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", plugins)
    assert read(tmp_path / "back").keys() == text.keys()
    save_file({**text, "model.visual.pos_embed.weight": torch.zeros(64, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(WeightMappingError, match=r"model\.visual\.blocks\.0\.attn\.proj\.bias: missing"):
        hf_to_megatron(source, tmp_path / "other", plugins)


def test_transformers_reads_what_came_back(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf", tied=False, dtype="bfloat16", max_shard_size="100KB")
    hf_to_megatron(source, tmp_path / "megatron", plugins)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", plugins)
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(tmp_path / "back").eos_token == "<eos>"


def test_processes_share_the_work(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron", plugins, workers=2, check=True)
    assert len(list((tmp_path / "megatron" / "model").glob("*.distcp"))) == 2
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", plugins)
    before, after = read(source), read(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def canonical(checkpoint: Path, family: str = "qwen3") -> dict[str, Tensor]:
    """Return all tensors of a Megatron checkpoint."""
    reader = DistReader(checkpoint / "model")
    hf = json.loads((checkpoint / "hf" / "config.json").read_text())
    return {rule.canonical: reader.read(rule).clone() for rule in model_rules(FAMILIES[family], hf)}


def rewrite(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Let torch write the tensors of a checkpoint."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    for file in (checkpoint / "model").glob("*.distcp"):
        file.unlink()
    save(tensors, storage_writer=FileSystemWriter(checkpoint / "model", sync_files=False), no_dist=True)


def stacked(named: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return tensors as Megatron saves layers that are alike: as one."""
    stacks: dict[str, Tensor] = {name: each for name, each in named.items() if ".layers." not in name}
    inner = {name.split(".", 3)[3] for name in named if ".layers." in name}
    for name in inner:
        parts = [named[f"decoder.layers.{layer}.{name}"] for layer in range(layers)]
        stacks[f"decoder.layers.{name}"] = torch.stack(parts)
    return stacks


@pytest.mark.filterwarnings("ignore")
def test_layers_that_megatron_has_stacked(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    megatron = tmp_path / "megatron"
    hf_to_megatron(source, megatron, plugins)
    rewrite(megatron, stacked(canonical(megatron), layers=2))
    megatron_to_hf(megatron, tmp_path / "back", plugins)
    before, after = read(source), read(tmp_path / "back")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_whose_elements_lie_by_columns(plugins: Plugins, tmp_path: Path) -> None:
    megatron, source = tmp_path / "megatron", tiny_qwen3(tmp_path / "hf")
    hf_to_megatron(source, megatron, plugins)
    turned = {name: each.t().contiguous().t() for name, each in canonical(megatron).items() if each.dim() > 1}
    rewrite(megatron, canonical(megatron) | turned)
    megatron_to_hf(megatron, tmp_path / "back", plugins)
    before, after = read(source), read(tmp_path / "back")
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.filterwarnings("ignore")
def test_a_stack_of_more_layers_than_the_model_has_is_refused(plugins: Plugins, tmp_path: Path) -> None:
    megatron = tmp_path / "megatron"
    hf_to_megatron(tiny_qwen3(tmp_path / "hf", layers=4), megatron, plugins)
    rewrite(megatron, stacked(canonical(megatron), layers=4))
    change_config(num_hidden_layers=2, layer_types=["full_attention"] * 2)(megatron / "hf")
    with pytest.raises(WeightMappingError, match=r"decoder\.layers\.mlp\..*holds 4, .* model has 2 of them"):
        megatron_to_hf(megatron, tmp_path / "back", plugins)


def test_a_stack_of_more_experts_than_the_model_has_is_refused(plugins: Plugins, tmp_path: Path) -> None:
    megatron = tmp_path / "megatron"
    hf_to_megatron(family_directory(FAMILIES["qwen3_moe"], tmp_path / "hf"), megatron, plugins)
    experts = FAMILIES["qwen3_moe"].tiny()["num_experts"]

    def grow(metadata: Any) -> None:
        for name, found in metadata.state_dict_metadata.items():
            if "experts.experts" in name:
                found.size = torch.Size([experts + 1, *found.size[1:]])

    change_index(grow)(megatron / "model")
    with pytest.raises(WeightMappingError, match=rf"holds {experts + 1}, .* model has {experts} of them"):
        megatron_to_hf(megatron, tmp_path / "back", plugins)


def test_experts_of_several_types_are_refused(plugins: Plugins, tmp_path: Path) -> None:
    source = family_directory(FAMILIES["qwen3_moe"], tmp_path / "hf")
    edit(lambda w: w.update({name: each.half() for name, each in w.items() if ".experts.1." in name}))(source)
    text = r"layers.1.mlp.experts.*linear_fc1.weight: of several types, torch.bfloat16, torch.float16"
    with pytest.raises(WeightMappingError, match=text):
        hf_to_megatron(source, tmp_path / "megatron", plugins)


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_of_another_type_than_the_index_says(plugins: Plugins, tmp_path: Path) -> None:
    megatron = tmp_path / "megatron"
    hf_to_megatron(tiny_qwen3(tmp_path / "hf", dtype="float16"), megatron, plugins)
    other = pickle.loads((megatron / "model" / ".metadata").read_bytes())
    rewrite(megatron, {name: each.bfloat16() for name, each in canonical(megatron).items()})
    change_index(lambda m: m.state_dict_metadata.update(other.state_dict_metadata))(megatron / "model")
    with pytest.raises(
        CheckpointError, match=r"it holds torch.bfloat16 .*where .metadata says torch.float16"
    ):
        megatron_to_hf(megatron, tmp_path / "back", plugins)


def test_a_tensor_in_two_files_is_refused(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf", max_shard_size="100KB")
    first, *_, last = sorted(source.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: tensor * 0}, last, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"holds {name} twice, in {first.name} and in {last.name}"):
        hf_to_megatron(source, tmp_path / "megatron", plugins)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_says_of_which_type_the_tensors_are(plugins: Plugins, tmp_path: Path, key: str) -> None:
    source, megatron = tiny_qwen3(tmp_path / "hf", dtype="bfloat16"), tmp_path / "megatron"
    change_config(**{"dtype": ..., key: "bfloat16"})(source)
    hf_to_megatron(source, megatron, plugins)
    megatron_to_hf(megatron, tmp_path / "same", plugins)
    assert (tmp_path / "same" / "config.json").read_text() == (source / "config.json").read_text()
    rewrite(megatron, {name: each.float() for name, each in canonical(megatron).items()})
    megatron_to_hf(megatron, tmp_path / "back", plugins)
    before, after = (json.loads((each / "config.json").read_text()) for each in (source, tmp_path / "back"))
    del before[key]
    assert after == before | {"dtype": "float32"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.float32


def test_the_config_promises_no_heads_that_were_left_out(plugins: Plugins, tmp_path: Path) -> None:
    source, megatron = tiny_qwen3(tmp_path / "hf"), tmp_path / "megatron"
    told = {"num_nextn_predict_layers": 1, "text_config": {"mtp_num_hidden_layers": 1, "dtype": "float32"}}
    hf_to_megatron(source, megatron, plugins)
    change_config(**told)(megatron / "hf")
    megatron_to_hf(megatron, tmp_path / "back", plugins)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == written["text_config"]["mtp_num_hidden_layers"] == 0


def padded(checkpoint: Path, rows: int, value: float) -> None:
    """Give the embedding and the output layer more rows."""
    tensors = canonical(checkpoint)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        more = tensors[name].new_full((rows, tensors[name].shape[1]), value)
        tensors[name] = torch.cat([tensors[name], more])
    rewrite(checkpoint, tensors)


@pytest.mark.filterwarnings("ignore")
def test_the_padding_of_a_vocabulary_is_counted(plugins: Plugins, tmp_path: Path) -> None:
    megatron, source = tmp_path / "megatron", tiny_qwen3(tmp_path / "hf", tied=False)
    hf_to_megatron(source, megatron, plugins)
    padded(megatron, 46, 0.0)
    left_out = megatron_to_hf(megatron, tmp_path / "back", plugins, check=True)
    assert left_out == {"embedding.word_embeddings.weight": 46, "output_layer.weight": 46}
    before, after = read(source), read(tmp_path / "back")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("rows", "value", "text"),
    [
        (46, 1e-3, "46 rows beyond a vocabulary of 18, which are not all 0"),
        (8192, 0.0, "8192 rows beyond a vocabulary of 18, which is more than any padding"),
    ],
)
def test_rows_that_are_no_padding_are_refused(
    plugins: Plugins, tmp_path: Path, rows: int, value: float, text: str
) -> None:
    megatron = tmp_path / "megatron"
    hf_to_megatron(tiny_qwen3(tmp_path / "hf", tied=False), megatron, plugins)
    padded(megatron, rows, value)
    with pytest.raises(WeightMappingError, match=text):
        megatron_to_hf(megatron, tmp_path / "back", plugins)


def test_nothing_is_overwritten(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    hf_to_megatron(source, tmp_path / "megatron", plugins)
    for convert, directory in ((hf_to_megatron, source), (megatron_to_hf, tmp_path / "megatron")):
        with pytest.raises(CheckpointError, match="is not empty"):
            convert(directory, tmp_path / "full", plugins)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


def test_two_conversions_and_a_stranger_do_not_meet(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "precious").write_text("x")

    def fail(run: Any, hf: Path, megatron: Path, shares: Any) -> None:
        monkeypatch.undo()
        hf_to_megatron(source, tmp_path / "out", plugins)

    monkeypatch.setattr(conversion, "_compare", fail)
    with pytest.raises(CheckpointError, match="Cannot convert into"):
        hf_to_megatron(source, tmp_path / "out", plugins, check=True)
    megatron_to_hf(tmp_path / "out", tmp_path / "back", plugins, check=True)
    assert (tmp_path / ".out.partial" / "precious").read_text() == "x"
    assert len(list(tmp_path.iterdir())) == 4


def test_a_directory_that_is_no_checkpoint_is_refused(plugins: Plugins, tmp_path: Path) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="not a Megatron checkpoint"):
        megatron_to_hf(source, tmp_path / "out", plugins)


def test_a_target_that_cannot_be_made_is_refused_before_anything_is_read(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(conversion, "open_unquantized", None)
    with pytest.raises(CheckpointError, match=r"Cannot convert into .*out: .*Not a directory"):
        hf_to_megatron(source, tmp_path / "file" / "out", plugins)


def test_the_current_directory_and_a_mount_are_no_targets(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(conversion, "open_unquantized", None)
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    with pytest.raises(CheckpointError, match="it is where a file system is mounted"):
        hf_to_megatron(source, tmp_path / "empty", plugins)
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(
        CheckpointError, match=r"it is the current directory.*\n.*Name a directory in it: OUT"
    ):
        hf_to_megatron(source, Path(), plugins)


def test_a_target_is_where_it_was_when_the_work_began(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    hf_to_megatron(source, Path("../other"), plugins)
    assert (tmp_path / "other" / "model").is_dir()


def refusal(text: str) -> SafetensorError:
    return SafetensorError(f"Error while serializing: I/O error: {text}")


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ("into .*/back: ", "Make room")),
        (refusal("No space left on device (os error 28)"), ("into .*/back: ", "Make room")),
        (refusal("File too large (os error 27)"), ("into .*/back: ", "ulimit -f")),
        (OSError(errno.EACCES, "Permission denied", "back/x"), ("into .*/back: ", "that you may write to")),
        (OSError(errno.EIO, "Input/output error"), ("into .*/back: ", "on another disk")),
        (OSError(errno.EACCES, "Permission denied", "{}/model/a"), (".*/megatron: ", "Make it readable")),
    ],
)
def test_what_the_system_refuses_is_said(
    plugins: Plugins,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    texts: tuple[str, str],
) -> None:
    megatron = tmp_path / "megatron"
    hf_to_megatron(tiny_qwen3(tmp_path / "hf"), megatron, plugins)
    if isinstance(error, OSError) and error.filename:
        error.filename = error.filename.format(megatron)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(conversion, "save_file", refuse)
    with pytest.raises(CheckpointError, match=rf"Cannot convert {texts[0]}.*\n.*{texts[1]}"):
        megatron_to_hf(megatron, tmp_path / "back", plugins)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


def edit(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        weights = load_file(source / "model.safetensors")
        change(weights)
        save_file(weights, source / "model.safetensors", metadata={"format": "pt"})

    return apply


def rename_architecture(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLMX"]}))


def cut(source: Path) -> None:
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-100])


def untie(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


def change_config(**changes: Any) -> Callable[[Path], None]:
    def apply(source: Path) -> None:
        config = json.loads((source / "config.json").read_text()) | changes
        kept = {key: value for key, value in config.items() if value is not ...}
        (source / "config.json").write_text(json.dumps(kept))

    return apply


NORM = "decoder.final_layernorm.weight"
FINAL, OUTPUT = "model.norm.weight", "model.layers.0.self_attn.o_proj.weight"
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (edit(lambda w: w.pop("model.norm.weight")), WeightMappingError, r"norm\.weight: missing"),
        (edit(lambda w: w.update(x=torch.zeros(1))), WeightMappingError, "x: .* unknown to the model"),
        (edit(lambda w: w.update({K: w[K][1:]})), WeightMappingError, r"k_proj.*dimension 0 must have"),
        (
            edit(lambda w: w.update({Q: w[Q][:, 1:].clone()})),
            WeightMappingError,
            "shapes that do not combine",
        ),
        (edit(lambda w: w.update({K: w[K].bfloat16()})), WeightMappingError, "of several types"),
        (edit(lambda w: w.update({FINAL: torch.zeros(7)})), WeightMappingError, r"model.norm.*\(7,\)"),
        (edit(lambda w: w.update({OUTPUT: torch.zeros(5, 5)})), WeightMappingError, r"o_proj.*\(5, 5\)"),
        (edit(lambda w: w.update({FINAL: w[FINAL].char()})), WeightMappingError, "of type torch.int8"),
        (change_config(hidden_size=32), WeightMappingError, r"norm.weight: shape \(64,\)"),
        (change_config(num_attention_heads=...), CheckpointError, "lacks the key 'num_attention_heads'"),
        (
            change_config(num_hidden_layers="2"),
            CheckpointError,
            "num_hidden_layers = '2', which must be a number",
        ),
        (
            change_config(num_hidden_layers=True),
            CheckpointError,
            "num_hidden_layers = True, which must be a number",
        ),
        (
            change_config(hidden_size=None),
            CheckpointError,
            "hidden_size = None, which must be a number above 0",
        ),
        (change_config(vocab_size=0), CheckpointError, "vocab_size = 0, which must be a number above 0"),
        (change_config(head_dim=[2]), CheckpointError, r"cannot use: .*list.*\n.*without a value are: "),
        (edit(untie), WeightMappingError, "lm_head.weight: differs from model.embed_tokens.weight"),
        (cut, CheckpointError, "cannot be read as safetensors"),
        (rename_architecture, UnknownNameError, "Qwen3ForCausalLMX"),
    ],
)
def test_a_bad_directory_leaves_nothing_behind(
    plugins: Plugins, tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], text: str
) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    damage(source)
    with pytest.raises(error, match=text):
        hf_to_megatron(source, tmp_path / "out", plugins)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def torn_file(model: Path) -> None:
    file = next(model.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def torn_index(model: Path) -> None:
    index = model / ".metadata"
    index.write_bytes(index.read_bytes()[:-20])


def change_index(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        metadata = pickle.loads((model / ".metadata").read_bytes())
        change(metadata)
        (model / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("touch pickle_ran",)


def run_code(model: Path) -> None:
    (model / ".metadata").write_bytes(pickle.dumps(Command()))


def resize(metadata: Any) -> None:
    found = metadata.state_dict_metadata["decoder.layers.0.mlp.linear_fc1.weight"]
    found.size = torch.Size([found.size[0] + 2, found.size[1]])


def drop_offset(metadata: Any) -> None:
    del next(iter(metadata.storage_data.values())).offset


def set_of_norm(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in values.items():
            setattr(metadata.state_dict_metadata[NORM], name, value)

    return change


def set_storage(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in values.items():
            setattr(next(iter(metadata.storage_data.values())), name, value)

    return change


def repeat_a_chunk(metadata: Any) -> None:
    """Say that a half of a tensor is there twice, and the other half not at all."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    found = metadata.state_dict_metadata[name]
    rows = found.size[0]
    found.size = torch.Size([2 * rows, found.size[1]])
    (chunk,) = found.chunks
    found.chunks.append(chunk)


def shift_a_chunk(metadata: Any) -> None:
    """Say that the first elements of a tensor are there twice, and the last ones not at all."""
    (chunk,) = metadata.state_dict_metadata[NORM].chunks
    for offset in (0, 16):
        part = replace(chunk, offsets=torch.Size([offset]), sizes=torch.Size([32]))
        metadata.state_dict_metadata[NORM].chunks.append(part)
        metadata.storage_data[MetadataIndex(NORM, [offset])] = next(iter(metadata.storage_data.values()))
    del metadata.state_dict_metadata[NORM].chunks[0]


def save_instead(value: object) -> Callable[[Path], None]:
    """Put a value into the place of a tensor."""

    def apply(model: Path) -> None:
        torch.save(value, model / "other.distcp")
        size = (model / "other.distcp").stat().st_size
        info = {"relative_path": "other.distcp", "offset": 0, "length": size}
        change_index(lambda m: vars(m.storage_data[MetadataIndex(NORM, [0])]).update(info))(model)

    return apply


def drop_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata[NORM].chunks.clear()


def drop_key(metadata: Any) -> None:
    metadata.state_dict_metadata.pop(NORM)


def add_key(metadata: Any) -> None:
    metadata.state_dict_metadata["x"] = metadata.state_dict_metadata[NORM]
    (place,) = (each for each in metadata.storage_data if each.fqn == NORM)
    metadata.storage_data[replace(place, fqn="x")] = metadata.storage_data[place]


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (torn_file, CheckpointError, r"distcp.*has \d+ bytes and should have"),
        (torn_index, CheckpointError, r"\.metadata of a Megatron checkpoint cannot be used"),
        (lambda model: (model / ".metadata").unlink(), CheckpointError, "no such file"),
        (lambda model: next(model.glob("*.distcp")).unlink(), CheckpointError, "is missing"),
        (change_index(drop_chunk), CheckpointError, "final_layernorm.weight lacks 64 elements"),
        (change_index(drop_key), WeightMappingError, "final_layernorm.weight: missing"),
        (change_index(add_key), WeightMappingError, "x: in the checkpoint but unknown"),
        (run_code, CheckpointError, "it names .*system, which belongs in no checkpoint"),
        (
            lambda model: change_config(hidden_size=32)(model.parent / "hf"),
            WeightMappingError,
            r"norm.weight: shape \(64,\), where config.json asks for \(32",
        ),
        (change_index(resize), WeightMappingError, "dimension 0 must have 256"),
        (
            lambda model: change_config(vocab_size=0)(model.parent / "hf"),
            CheckpointError,
            "vocab_size = 0, which must be a number above 0",
        ),
        (change_index(lambda m: m.storage_data.popitem()), CheckpointError, "metadata .*KeyError"),
        (change_index(drop_offset), CheckpointError, "metadata .*AttributeError: .*offset"),
        (change_index(lambda m: setattr(m, "storage_data", None)), CheckpointError, "metadata .*TypeError"),
        (change_index(lambda m: setattr(m, "storage_data", {})), CheckpointError, "metadata .*KeyError"),
        (change_index(lambda m: setattr(m, "state_dict_metadata", 3)), CheckpointError, "AttributeError"),
        (change_index(set_of_norm(size=None)), CheckpointError, "metadata .*TypeError"),
        (change_index(set_of_norm(size=("a",))), CheckpointError, "metadata .*ValueError"),
        (change_index(set_of_norm(properties=None)), CheckpointError, "metadata .*AttributeError"),
        (change_index(set_of_norm(chunks=[None])), CheckpointError, "metadata .*AttributeError"),
        (change_index(set_storage(offset=-7)), CheckpointError, "metadata .*at byte -7 of __0_0.distcp"),
        (change_index(set_storage(relative_path="../x")), CheckpointError, "metadata .*at byte .* of ../x"),
        (change_index(repeat_a_chunk), CheckpointError, "overlap"),
        (change_index(shift_a_chunk), CheckpointError, "parts of .* overlap"),
        (save_instead({"a": 1}), CheckpointError, "it holds dict, where a tensor belongs"),
        (
            save_instead(torch.zeros(8, 8)),
            CheckpointError,
            r"of shape \(8, 8\), where .metadata says .*\(64,\)",
        ),
        (save_instead(Command()), CheckpointError, "UnpicklingError: Weights only load failed"),
    ],
)
def test_a_bad_checkpoint_leaves_nothing_behind(
    plugins: Plugins,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tiny_qwen3(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron", plugins)
    damage(tmp_path / "megatron" / "model")
    with pytest.raises(error, match=text):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out", plugins)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


@pytest.mark.parametrize("way", ["megatron", "hf"])
def test_a_check_sees_one_bit(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    edit(lambda w: w.update({FINAL: torch.rand(64)}))(source)  # bytes that are there once
    hf_to_megatron(source, tmp_path / "megatron", plugins)
    needle = load_file(source / "model.safetensors")[FINAL].numpy().tobytes()
    compare = conversion._compare

    def flipped(run: Any, one: Path, other: Path, shares: Any) -> None:
        (path,) = other.glob("*.distcp") if way == "megatron" else one.glob("*.safetensors")
        data = bytearray(path.read_bytes())
        data[data.index(needle) + 5] ^= 4
        path.write_bytes(data)
        compare(run, one, other, shares)

    monkeypatch.setattr(conversion, "_compare", flipped)
    convert, given = (
        (hf_to_megatron, source) if way == "megatron" else (megatron_to_hf, tmp_path / "megatron")
    )
    with pytest.raises(CheckpointError, match=rf"1 tensors changed .*: {NORM}"):
        convert(given, tmp_path / "out", plugins, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


def test_a_check_that_fails_leaves_nothing_behind(
    plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_qwen3(tmp_path / "hf")
    monkeypatch.setattr(conversion, "_same_bits", lambda one, other: one.dim() > 1)
    with pytest.raises(CheckpointError, match=r"tensors changed.*final_layernorm"):
        hf_to_megatron(source, tmp_path / "out", plugins, workers=1, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
