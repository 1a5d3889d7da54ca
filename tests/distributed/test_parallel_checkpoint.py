"""A checkpoint is loaded by ranks that divide the model in another way, and the next step is the same."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.engines.checkpoint_files import Piece, PieceReader, Region, open_pieces
from anygauge.engines.megatron.conversion.convert import hf_to_megatron, megatron_to_hf
from anygauge.kernels.remainders import split
from anygauge.plugins import load_plugins

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

CASES = Path(__file__).with_name("checkpoint_cases.py")
VOCAB = 63
"""No multiple of 2, so that tensor parallelism pads it."""
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "single": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-dp2": (4, {"pipeline": 2}),
    "cp2-vpp2": (4, {"context": 2, "pipeline": 2, "virtual_pipeline": 2}),
    "ep2-pp2": (4, {"expert": 2, "pipeline": 2}),
    "ep2-tp2": (4, {"expert": 2, "tensor": 2}),
    "etp2": (2, {"expert_tensor": 2}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "experts": ("qwen3_moe", {"initializer_range": 0.1}),
    "biased": ("glm4_moe", {"initializer_range": 0.1}),
    "delta": (
        "qwen3_5",
        {"layer_types": ["linear_attention", "full_attention"] * 2, "initializer_range": 0.1},
    ),
}

MEGATRON: dict[str, dict[str, Any]] = {"biased": {"moe_router_bias_update_rate": 0.01}}


class Checkpoints:
    """Runs that were saved, and those that went on from them."""

    def __init__(self, crew: Any, make_model: Any, directory: Path) -> None:
        self._crew, self._make_model, self._directory = crew, make_model, directory
        self._saved: dict[tuple[str, ...], tuple[Path, Any]] = {}

    def saved(self, model: str, layout: str, dtype: str = "float32") -> tuple[Path, Any]:
        """Return the checkpoint of a run, and what each rank had before and after its next step."""
        key = (model, layout, dtype)
        if key not in self._saved:
            target = self._directory / "-".join(key)
            self._saved[key] = (target, self.run("saved", model, layout, dtype=dtype, target=str(target)))
        return self._saved[key]

    def resumed(self, model: str, layout: str, source: Path, dtype: str = "float32") -> tuple[Path, Any]:
        """Return the checkpoint that a layout made of another, and what its ranks had."""
        target = source.with_name(f"{source.name}-to-{layout}")
        found = self.run("resumed", model, layout, dtype=dtype, source=str(source), target=str(target))
        return target, found

    def model(self, name: str) -> Path:
        """Return the Hugging Face directory that a run began with."""
        family, changes = MODELS[name]
        path: Path = self._make_model(family, vocab_size=VOCAB, num_hidden_layers=4, **changes)
        return path

    def run(self, action: str, model: str, layout: str, *, dtype: str = "float32", **case: Any) -> list[Any]:
        world, parallel = LAYOUTS[layout]
        found: list[Any] = self._crew.run(
            world=world,
            action=f"{CASES}:{action}",
            model=str(self.model(model)),
            vocab=VOCAB,
            parallel=parallel,
            train={
                "dtype": dtype,
                "weight_decay": 0.1,
                "lr_schedule": "cosine",
                "warmup_steps": 2,
                "megatron": MEGATRON.get(model, {}),
            },
            **case,
        )
        for rank, result in enumerate(found):
            assert not hasattr(result, "text"), f"rank {rank}: {getattr(result, 'text', '')}"
        return found


@pytest.fixture(scope="module")
def checkpoints(crew: Any, make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(crew, make_model, tmp_path_factory.mktemp("checkpoints"))


def whole_tensors(directory: Path) -> dict[str, Any]:
    """Return all that a checkpoint has of each parameter, put together."""
    found: dict[str, Any] = {}
    with open_pieces(directory) as reader:
        for name, piece in {piece.name: piece for file in reader.files for piece in file.pieces}.items():
            part = (name, undivided(piece.region))
            end = part[1].elements
            for kind in reader.kinds(*part, 0, end):
                found[f"{kind}/{name}"] = reader.read(kind, *part, 0, end)
            found[name] = reader.scalars(*part, 0, end)
    return found


def undivided(region: Region) -> Region:
    size = region.shape[region.dim]
    return replace(region, stretches=((0, size),), size=size)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare to the bit."""
    assert one.keys() == other.keys()
    odd = [
        name
        for name, value in one.items()
        if not (torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name])
    ]
    assert odd == []


RESHARDINGS = [
    ("tied", "tp2", "pp2"),
    ("tied", "tp2", "dp2"),
    ("tied", "tp2", "single"),
    ("tied", "tp2-dp2", "pp2-dp2"),
    ("untied", "tp2-dp2", "cp2-vpp2"),
    ("untied", "vpp2", "tp2"),
    ("experts", "ep2", "single"),
    ("experts", "tp2", "ep2-pp2"),
    ("experts", "etp2", "ep2"),
    ("biased", "ep2-pp2", "tp2"),
    ("delta", "tp2", "pp2"),
]


@pytest.mark.parametrize(("model", "before", "after"), RESHARDINGS)
def test_another_layout_takes_the_same_step(
    checkpoints: Checkpoints, model: str, before: str, after: str
) -> None:
    source, undisturbed = checkpoints.saved(model, before)
    target, found = checkpoints.resumed(model, after, source)
    kept = whole_tensors(source)
    assert_same(whole_tensors(target), kept)
    check_step(found, undisturbed)
    biases = [each for name, each in kept.items() if name.startswith("weight/") and "expert_bias" in name]
    assert bool(biases) == (model == "biased")
    assert all(each.any() for each in biases)


def check_step(found: list[Any], undisturbed: list[Any]) -> None:
    for rank in found:
        assert_same(rank["before"], undisturbed[0]["before"])
        for name, weight in rank["after"].items():
            torch.testing.assert_close(weight, undisturbed[0]["after"][name], rtol=0, atol=1e-7, msg=name)
        (step,), (wanted,) = rank["metrics"], undisturbed[0]["metrics"]
        assert step["lr"] == wanted["lr"]
    moved = [not torch.equal(each, found[0]["before"][name]) for name, each in found[0]["after"].items()]
    assert any(moved)


def test_experts_go_through_several_layouts(checkpoints: Checkpoints) -> None:
    source, undisturbed = checkpoints.saved("experts", "ep2")
    between, _ = checkpoints.resumed("experts", "single", source)
    target, found = checkpoints.resumed("experts", "ep2-tp2", between)
    assert_same(whole_tensors(target), whole_tensors(source))
    check_step(found, undisturbed)


@pytest.mark.parametrize(("model", "layout"), [("tied", "tp2-dp2"), ("experts", "ep2")])
def test_the_same_layout_goes_on_to_the_bit(checkpoints: Checkpoints, model: str, layout: str) -> None:
    source, undisturbed = checkpoints.saved(model, layout)
    target, found = checkpoints.resumed(model, layout, source)
    for one, other in zip(found, undisturbed, strict=True):
        assert_same(one["after"], other["after"])
        assert one["metrics"] == other["metrics"]
    for path in sorted(source.glob("*.json")):
        assert json.loads((target / path.name).read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("model", "layout"), [("tied", "tp2-dp2"), ("untied", "vpp2"), ("experts", "ep2"), ("delta", "tp2")]
)
def test_the_weights_of_any_layout_are_converted(
    checkpoints: Checkpoints, tmp_path: Path, model: str, layout: str
) -> None:
    source, undisturbed = checkpoints.saved(model, layout)
    hf, plugins = checkpoints.model(model), load_plugins()
    megatron_to_hf(source, tmp_path / "hf", plugins, check=True, model=hf)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    assert_same(load_file(file), undisturbed[0]["before"])
    hf_to_megatron(source, tmp_path / "megatron", plugins, check=True, model=hf)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again", plugins)
    assert_same(load_file(tmp_path / "again" / file.name), undisturbed[0]["before"])


def test_the_weights_of_the_optimizer_are_divided_anew(checkpoints: Checkpoints) -> None:
    source, _ = checkpoints.saved("tied", "tp2-dp2", "bfloat16")
    target, _ = checkpoints.resumed("tied", "pp2", source, "bfloat16")
    assert any(name.startswith("main/") for name in whole_tensors(source))
    assert_same(whole_tensors(target), whole_tensors(source))


def test_weights_beside_remainders_are_the_same_on_every_rank(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """They are not those of the checkpoint, where its float32 weights are in the middle between two."""
    source, target = tmp_path / "source", tmp_path / "target"
    before = checkpoints.run("saved_at_ties", "tied", "dp2", dtype="bfloat16", target=str(source))
    given = {"source": str(source), "target": str(target), "joins": True}
    found = checkpoints.run("loaded", "tied", "tp2-dp2", dtype="bfloat16", **given)
    wanted, again = (whole_tensors(each) for each in (source, target))
    for name, tensor in wanted.items():
        if name.startswith("main/"):
            assert again[name].equal(tensor)
            assert again[name.replace("main", "weight", 1)].equal(split(tensor)[0])
    assert any(not weight.equal(before[0][name]) for name, weight in found[0].items())
    for result in found:
        assert_same(result, found[0])


def test_a_critic_is_divided_anew(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source, target = tmp_path / "saved", tmp_path / "resumed"
    algorithm = {"advantage": "gae"}
    wanted, after = tmp_path / "wanted", tmp_path / "after"
    paths = {"target": str(source), "after": str(wanted)}
    undisturbed = checkpoints.run("saved", "tied", "tp2", algorithm=algorithm, **paths)
    paths = {"source": str(source), "target": str(target), "after": str(after)}
    found = checkpoints.run("resumed", "tied", "pp2", algorithm=algorithm, **paths)
    for role in (".", "critic"):
        assert_same(whole_tensors(target / role), whole_tensors(source / role))
    assert "exp_avg/output_layer.weight" in whole_tensors(source / "critic")
    for role in (".", "critic"):
        check_weights(after / role, wanted / role, before=source / role)
    (step,), (expected,) = found[0]["metrics"], undisturbed[0]["metrics"]
    for metrics in (step, expected):
        del metrics["explained_variance"]  # returns of a step here vary by rounding alone
    assert step == pytest.approx(expected, rel=1e-3, abs=1e-5)


def check_weights(found: Path, wanted: Path, *, before: Path) -> None:
    """Compare the weights of two checkpoints, all of which have moved since another."""
    tensors, expected, old = (whole_tensors(each) for each in (found, wanted, before))
    names = [name for name in expected if name.startswith("weight/")]
    assert tensors.keys() == expected.keys()
    assert [name for name in names if torch.equal(expected[name], old[name])] == []
    for name in names:
        torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize(("model", "layout"), [("tied", "tp2-dp2"), ("biased", "ep2-pp2")])
def test_every_element_is_saved_once(checkpoints: Checkpoints, model: str, layout: str) -> None:
    source, _ = checkpoints.saved(model, layout)
    with open_pieces(source) as reader:
        pieces = [piece for file in reader.files for piece in file.pieces]
        shapes = reader.shapes
    counted: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        counted[piece.name].append(piece)
    assert counted.keys() == shapes.keys()
    for name, parts in counted.items():
        elements = sum(region.elements for region in {part.region for part in parts})
        assert sum(part.end - part.start for part in parts) == elements, name
        assert len({part.region.stretches for part in parts}) == len({part.region for part in parts})
        padding = elements - undivided(parts[0].region).elements
        assert 0 <= padding <= parts[0].region.inner * (VOCAB % 2), name


def test_what_one_rank_cannot_load_changes_nothing_on_any(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source, _ = checkpoints.saved("tied", "tp2")
    other, _ = checkpoints.saved("untied", "vpp2")
    missing, torn, hole = (shutil.copytree(source, tmp_path / name) for name in ("missing", "torn", "hole"))
    (missing / "rank-00001.json").unlink()
    data = torn / "rank-00001.safetensors"
    data.write_bytes(data.read_bytes()[:-5])
    description = json.loads((hole / "rank-00001.json").read_text())
    description["pieces"] = [
        each for each in description["pieces"] if "linear_fc1.weight" not in each["name"]
    ]
    (hole / "rank-00001.json").write_text(json.dumps(description))
    damaged = {missing: "No such file", torn: "bytes instead of", hole: "lacks", other: "of another model"}
    sources = [(str(source), str(path)) for path in damaged]
    found = checkpoints.run("refused", "tied", "pp2", sources=sources)
    for number, message in enumerate(damaged.values()):
        for rank, (text, is_unchanged) in enumerate(each[number] for each in found):
            assert (message if rank == 1 else "this rank could") in text
            assert is_unchanged


def test_only_what_a_rank_needs_is_read(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tensor that other ranks divided along its rows, and no others."""
    source, _ = checkpoints.saved("tied", "tp2-dp2")
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    read = 0
    flat = PieceReader._flat

    def counted(reader: PieceReader, *arguments: Any) -> torch.Tensor:
        nonlocal read
        found = flat(reader, *arguments)
        read += found.numel()
        return found

    monkeypatch.setattr(PieceReader, "_flat", counted)
    with open_pieces(source) as reader:
        rows, columns = reader.shapes[name]
        whole = undivided(next(p.region for f in reader.files for p in f.pieces if p.name == name))
        expected = reader.read("weight", name, whole, 0, rows * columns)
        read = 0
        part = reader.read("weight", name, whole, 3 * columns + 1, 5 * columns + 2)
        assert expected is not None
        assert part is not None
        assert torch.equal(part, expected[3 * columns + 1 : 5 * columns + 2])
        assert read == 3 * columns
