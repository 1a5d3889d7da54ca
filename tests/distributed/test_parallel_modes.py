"""Every way to divide a model gives what one process gives: log-probs, losses, gradient norms, weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.engines.checkpoint_files import open_pieces
from anygauge.engines.megatron.weights.mapping import is_embedding

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

OVERLAP = {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1}}
"""A bucket for each weight: whoever reads one has to wait for it."""
VOCAB = 63
"""No multiple of 2, so that tensor parallelism pads it."""
MODES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "dp2-overlap": (2, {}, OVERLAP),
    "tp2": (2, {"tensor": 2, "sequence": False}, {}),
    "tp2-sp": (2, {"tensor": 2}, {}),
    "pp2": (2, {"pipeline": 2}, {}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "cp2": (2, {"context": 2}, {}),
    "vpp2-overlap": (2, {"pipeline": 2, "virtual_pipeline": 2}, OVERLAP),
    "vpp2-recompute": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"recompute": "full"}),
    "cp2-recompute": (2, {"context": 2}, {"recompute": "full"}),
    "cp2-selective": (2, {"context": 2}, {"recompute": "selective"}),
    "materialized-tp2-cp2": (4, {"tensor": 2, "context": 2}, {"fused_loss": False}),
    "tp2-dp2": (4, {"tensor": 2}, {"recompute": "elementwise"}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}, {}),
    "cp2-dp2": (4, {"context": 2}, {}),
    "cp2-vpp2": (4, {"context": 2, "pipeline": 2, "virtual_pipeline": 2}, {"recompute": "full"}),
    "dp4": (4, {}, {}),  # with fewer samples in a step than ranks
    "pp4": (4, {"pipeline": 4}, {}),
}


TIED_MODES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2-pp2-overlap": (4, {"pipeline": 2}, OVERLAP),
    "dp2-vpp2-overlap": (4, {"pipeline": 2, "virtual_pipeline": 2}, OVERLAP),
    "dp2-overlap-materialized": (2, {}, OVERLAP | {"fused_loss": False}),
    "pp2-materialized": (2, {"pipeline": 2}, {"fused_loss": False}),
    "pp2-uneven": (2, {"pipeline": 2}, {"megatron": {"num_layers_in_first_pipeline_stage": 1}}),
}
"""The last stage has a copy of the embedding, and its gradient."""
EXPERT_MODES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ep2": (2, {"expert": 2}, {}),
    "ep2-recompute": (2, {"expert": 2}, {"recompute": "full"}),
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}, {}),
    "ep2-tp2-dp2": (4, {"tensor": 2, "expert": 2}, {}),
    "ep2-cp2": (2, {"context": 2, "expert": 2}, {}),
    "ep4": (4, {"expert": 4}, {}),
    "ep2-pp2": (4, {"pipeline": 2, "expert": 2}, {}),
    "ep2-vpp2-overlap": (4, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, OVERLAP),
}
FIRST = [r"model\.embed_tokens\..*", r"model\.layers\.[01]\..*"]
"""All weights of the first of two pipeline stages."""
FROZEN_MODES: dict[str, tuple[str, int, dict[str, Any], list[str], str]] = {
    "tp2-selective": ("untied", 2, {"tensor": 2, "sequence": False}, FIRST, "selective"),
    "tp2-sp-full": ("untied", 2, {"tensor": 2}, FIRST, "full"),
    "tied-tp2": ("tied", 2, {"tensor": 2}, [r".*embed_tokens.*", r".*\.[13]\.self_attn\..*"], "full"),
    "pp2-full": ("untied", 2, {"pipeline": 2}, FIRST, "full"),
    "ep2-selective": ("experts", 2, {"expert": 2}, [r".*\.experts\..*"], "selective"),
    "ep2-tp2-full": ("experts", 4, {"expert": 2, "tensor": 2}, [*FIRST, r".*\.3\.mlp\..*"], "full"),
}
"""The model, ranks, layout, ``train.freeze`` and ``train.recompute``."""
DENSE = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "initializer_range": 0.1,  # with more, rounding alone grows to what a fault would look like
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **DENSE,
    "experts": ("qwen3_moe", {}),
    "latent": ("deepseek_v3", {}),
    "delta": ("qwen3_5", HYBRID),
    "delta-experts": ("qwen3_next", HYBRID),  # its checkpoint interleaves heads
    "groups": ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 4}),  # several on each rank, biases
    "some-rotary": ("smollm3", {"no_rope_layers": [1, 1, 0, 1], "initializer_range": 0.1}),
    "post-norms": ("glm4", {}),  # and biases, and angles of neighbors
    "wide-norms": ("olmo3", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "sinks": ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "window": ("gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
}
ATTENTION_MODES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "latent-tp2": ("latent", 2, {"tensor": 2}, {}),
    "latent-cp2": ("latent", 2, {"context": 2}, {"recompute": "selective"}),
    "latent-tp2-pp2": ("latent", 4, {"tensor": 2, "pipeline": 2}, {}),
    "latent-dp2-overlap": ("latent", 2, {}, OVERLAP),
    "delta-dp2-overlap": ("delta", 2, {}, OVERLAP),
    "delta-tp2": ("delta", 2, {"tensor": 2, "sequence": False}, {}),
    "delta-tp2-sp": ("delta", 2, {"tensor": 2}, {"recompute": "selective"}),
    "delta-cp2": ("delta", 2, {"context": 2}, {"recompute": "selective"}),
    "delta-cp2-pp2": ("delta", 4, {"context": 2, "pipeline": 2}, {"recompute": "full"}),
    "delta-experts-cp2": ("delta-experts", 2, {"context": 2}, {}),
    # more ranks than groups: several share one
    "tied-tp4": ("tied", 4, {"tensor": 4}, {}),
    "delta-tp4": ("delta", 4, {"tensor": 4}, {}),
    "post-norms-tp4": ("post-norms", 4, {"tensor": 4}, {}),
    "some-rotary-tp2-pp2": ("some-rotary", 4, {"tensor": 2, "pipeline": 2}, {"recompute": "full"}),
    "groups-tp2": ("groups", 2, {"tensor": 2}, {}),
    "wide-norms-cp2-pp2": ("wide-norms", 4, {"context": 2, "pipeline": 2}, {"recompute": "elementwise"}),
    "sinks-dp2-overlap": ("sinks", 2, {}, OVERLAP),
    "sinks-tp2-ep2": ("sinks", 2, {"tensor": 2, "expert": 2}, {}),
    "sinks-ep2-cp2-pp2": ("sinks", 4, {"context": 2, "expert": 2, "pipeline": 2}, {"recompute": "selective"}),
    "window-cp2": ("window", 2, {"context": 2}, {"recompute": "selective"}),
    "window-tp2-pp2": ("window", 4, {"tensor": 2, "pipeline": 2}, {"recompute": "elementwise"}),
    "delta-experts-tp2-ep2": ("delta-experts", 4, {"tensor": 2, "expert": 2}, {}),
}
WHOLE = Path(__file__).with_name("whole_cases.py")
WHOLE_PARALLEL = {"pipeline": 2, "virtual_pipeline": 2}
SPLIT = {
    "mlp.linear_fc1.weight": 0,
    "self_attention.linear_proj.weight": 1,
    "self_attention.out_proj.weight": 1,
}
"""Ends of the names that tensor parallelism divides, each with the dimension."""


def train_model(crew: Any, make_model: Any, model: str, world: int, **case: Any) -> list[Any]:
    family, changes = MODELS[model]
    path = make_model(family, vocab_size=VOCAB, num_hidden_layers=4, **changes)
    found: list[Any] = crew.run(world=world, action="train", model=str(path), vocab=VOCAB, **case)
    return found


@pytest.fixture(scope="module")
def alone(crew: Any, make_model: Any) -> Any:
    """Return what one process gives, by the name of the model and the settings of training."""
    known: dict[str, Any] = {}

    def run(model: str, train: dict[str, Any] | None = None) -> Any:
        key = f"{model} {train}"
        if key not in known:
            known[key] = train_model(crew, make_model, model, 1, train=train or {})[0]
        return known[key]

    return run


def assert_same(found: list[Any], expected: Any, *, atol: float = 2e-5) -> None:
    """Compare each rank's results with those of one process."""
    for rank, result in enumerate(found):
        assert not hasattr(result, "text"), f"rank {rank}: {getattr(result, 'text', '')}"
    for result in found:
        for step, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert step == pytest.approx(wanted, rel=2e-5, abs=1e-5), (step, wanted)
        assert result["metrics"] == found[0]["metrics"]
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], rtol=0, atol=atol, msg=name)
    for when in ("before", "after"):
        whole = {key: value for result in found for key, value in result[when].items()}
        assert whole.keys() == expected[when].keys()
        for key, value in whole.items():
            torch.testing.assert_close(value, expected[when][key], rtol=0, atol=5 * atol)


def assert_divided(
    found: list[Any], whole: Any, parallel: dict[str, Any], train: dict[str, Any], layers: int = 4
) -> None:
    """Check that what was compared with one process was divided as asked."""
    ways = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert")}
    share = ways["tensor"] * ways["pipeline"] * ways["context"]
    overlaps = train.get("megatron", {}).get("overlap_grad_reduce", False)
    for rank, division in enumerate(result["division"] for result in found):
        assert division["groups"] == {**ways, "data": len(found) // share}
        assert division["sequence"] == (parallel.get("sequence", True) and ways["tensor"] > 1)
        assert division["recompute"] == train.get("recompute")
        assert division["overlap"] == [overlaps, overlaps]
        assert division["chunks"] == parallel.get("virtual_pipeline", 1)
        shapes, stage = division["shapes"], rank * ways["pipeline"] // len(found)
        assert held(shapes, r"layers\.(\d+)\.") == layers_of(stage, parallel, train, layers)
        split = {name: dim for name in shapes for end, dim in SPLIT.items() if name.endswith(end)}
        assert split
        for name, dim in split.items():
            assert shapes[name][dim] * ways["tensor"] == whole["division"]["shapes"][name][dim], name
        experts = r"mlp\.experts\..*weight(\d+)$"
        assert len(held(shapes, experts)) * ways["expert"] == len(held(whole["division"]["shapes"], experts))


def held(names: Iterable[str], pattern: str) -> set[int]:
    """Return the numbers in the names that have one."""
    return {int(match[1]) for name in names if (match := re.search(pattern, name))}


def layers_of(stage: int, parallel: dict[str, Any], train: dict[str, Any], layers: int) -> set[int]:
    """Return the layers of a pipeline stage: some in a row, or parts in turns."""
    stages = parallel.get("pipeline", 1)
    if first := train.get("megatron", {}).get("num_layers_in_first_pipeline_stage"):
        return set(range(layers)[:first] if stage == 0 else range(layers)[first:])
    size = layers // (stages * parallel.get("virtual_pipeline", 1))
    return {layer for layer in range(layers) if layer // size % stages == stage}


@pytest.mark.parametrize(
    ("mode", "model"),
    [*((mode, model) for mode in MODES for model in DENSE), *((mode, "tied") for mode in TIED_MODES)],
)
def test_a_divided_model_trains_like_a_whole_one(
    crew: Any, make_model: Any, alone: Any, mode: str, model: str
) -> None:
    world, parallel, train = (MODES | TIED_MODES)[mode]
    found = train_model(crew, make_model, model, world, parallel=parallel, train=train)
    assert_same(found, alone(model))
    assert_divided(found, alone(model), parallel, train)


@pytest.mark.parametrize("mode", ["tp2", "pp2", "cp2"])
def test_division_adds_little_to_the_rounding_of_bfloat16(
    crew: Any, make_model: Any, alone: Any, mode: str
) -> None:
    """Another order of sums rounds to another number: 1.12 times the error of one process is most here.

    Before the first update, that is: Adam makes steps of full size of gradients that are all rounding, so
    that after some the error is that of chance, and 0.07 to 0.53 for the divisions of one model.
    """
    world, parallel, _ = MODES[mode]
    train = {"dtype": "bfloat16"}
    found = train_model(crew, make_model, "untied", world, parallel=parallel, train=train)
    rounded, exact = alone("untied", train), alone("untied")
    usual = error(rounded["before"], exact["before"])
    assert usual > 0.01
    assert error(found[0]["before"], exact["before"]) < 1.25 * usual
    for result in found:
        first, wanted = result["metrics"][0], rounded["metrics"][0]
        assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.01)  # 0.006 at most here
        assert result["metrics"] == found[0]["metrics"]
        for name, weight in result["weights"].items():
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, found[0]["weights"][name])
    assert_divided(found, exact, parallel, train)


@pytest.mark.parametrize("mode", ["dp2-overlap", "tp2", "ep2-pp2"])
def test_an_optimizer_that_takes_all_with_its_step_gives_the_same_weights(
    crew: Any, make_model: Any, mode: str
) -> None:
    world, parallel, train = (MODES | EXPERT_MODES)[mode]
    model = "experts" if "expert" in parallel else "untied"
    case: dict[str, Any] = {"parallel": parallel, "train": train | {"dtype": "bfloat16", "clip_grad": 0.1}}
    expected, found = (
        train_model(crew, make_model, model, world, takes=takes, **case) for takes in (False, True)
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("mode", ["dp2", "dp2-overlap", "tp2", "ep2-pp2", "dp2-pp2-overlap"])
def test_an_optimizer_that_takes_remainders_gives_the_same_weights(
    crew: Any, make_model: Any, mode: str
) -> None:
    world, parallel, train = (MODES | TIED_MODES | EXPERT_MODES)[mode]
    model = "experts" if "expert" in parallel else "tied" if mode in TIED_MODES else "untied"
    case: dict[str, Any] = {"parallel": parallel, "train": train | {"dtype": "bfloat16", "clip_grad": 0.1}}
    expected, found = (
        train_model(crew, make_model, model, world, **case, **{kind: True}) for kind in ("rounds", "joins")
    )
    assert_equal(found, expected)


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Compare to the bit."""
    for one, other in zip(found, expected, strict=True):
        assert one["metrics"] == other["metrics"]
        assert all(weight.equal(other["weights"][name]) for name, weight in one["weights"].items())


def error(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> float:
    """Return the root of the mean squared difference of all log-probs."""
    differences = [found[key] - values for key, values in expected.items()]
    return float(torch.cat(differences).square().mean().sqrt())


@pytest.mark.parametrize("mode", ATTENTION_MODES)
def test_other_kinds_of_attention_train_like_whole_ones(
    crew: Any, make_model: Any, alone: Any, mode: str
) -> None:
    model, world, parallel, train = ATTENTION_MODES[mode]
    found = train_model(crew, make_model, model, world, parallel=parallel, train=train)
    assert_same(found, alone(model))
    assert_divided(found, alone(model), parallel, train)


@pytest.mark.parametrize("mode", EXPERT_MODES)
def test_divided_experts_train_like_whole_ones(crew: Any, make_model: Any, alone: Any, mode: str) -> None:
    world, parallel, train = EXPERT_MODES[mode]
    found = train_model(crew, make_model, "experts", world, parallel=parallel, train=train)
    assert_same(found, alone("experts"))
    assert_divided(found, alone("experts"), parallel, train)


@pytest.mark.parametrize("mode", FROZEN_MODES)
def test_frozen_weights_stay_as_they_are(crew: Any, make_model: Any, alone: Any, mode: str) -> None:
    """The others train as in one process that recomputes nothing."""
    model, world, parallel, freeze, recompute = FROZEN_MODES[mode]
    train = {"freeze": freeze, "recompute": recompute}
    found = train_model(crew, make_model, model, world, parallel=parallel, train=train)
    assert_same(found, alone(model, {"freeze": freeze}))
    assert_divided(found, alone(model), parallel, train)
    family, changes = MODELS[model]
    directory = make_model(family, vocab_size=VOCAB, num_hidden_layers=4, **changes)
    before = load_file(directory / "model.safetensors")
    for name, weight in found[0]["weights"].items():
        assert weight.equal(before[name]) == any(re.fullmatch(each, name) for each in freeze), name


def test_every_rank_refuses_to_train_nothing(crew: Any, make_model: Any) -> None:
    """None waits for another; see ``pp2-full`` for a rank that has nothing to train alone."""
    train = {"freeze": [".*"]}
    found = train_model(crew, make_model, "untied", 2, parallel={"pipeline": 2}, train=train)
    assert all("train.freeze = ['.*'] leaves nothing to train" in each.text for each in found)


@pytest.mark.parametrize(
    "parallel", [{"tensor": 2}, {"expert": 2, "pipeline": 2}], ids=["tp2-dp2", "ep2-pp2"]
)
def test_divided_models_pack_prefixes(crew: Any, make_model: Any, parallel: dict[str, Any]) -> None:
    """Two optimizer steps, each with two samples of every group of four."""
    case: dict[str, Any] = {"samples": 12, "group": 4, "steps": 2}
    (alone,) = train_model(crew, make_model, "experts", 1, **case)
    train = {"prefix_packing": True}
    found = train_model(crew, make_model, "experts", 4, parallel=parallel, train=train, **case)
    assert_same(found, alone)
    assert all(result["packed_tokens"] < sum(map(len, result["after"])) for result in found)


@pytest.fixture
def whole(make_model: Any, tmp_path: Path) -> Path:
    """Return a model with tied embeddings, of which the last stage has a copy, for the family of its own."""
    family, changes = MODELS["tied"]
    model, target = make_model(family, vocab_size=VOCAB, num_hidden_layers=4, **changes), tmp_path / "whole"
    shutil.copytree(model, target)
    hf = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**hf, "architectures": ["WholeForCausalLM"]}))
    return target


def test_a_model_of_a_familys_own_trains_like_the_decoder_in_it(crew: Any, alone: Any, whole: Path) -> None:
    case = {"model": str(whole), "vocab": VOCAB, "parallel": WHOLE_PARALLEL}
    assert_same(crew.run(world=2, action=f"{WHOLE}:train", **case), alone("tied"))


def test_a_model_of_a_familys_own_goes_on_in_another_division(crew: Any, whole: Path, tmp_path: Path) -> None:
    case = {"model": str(whole), "vocab": VOCAB, "target": str(tmp_path / "vpp2")}
    (*_, expected) = crew.run(world=2, action=f"{WHOLE}:saved", parallel=WHOLE_PARALLEL, **case)
    with open_pieces(tmp_path / "vpp2") as reader:
        pieces = [piece for file in reader.files for piece in file.pieces if is_embedding(piece.name)]
    assert sum(piece.end - piece.start for piece in pieces) == pieces[0].region.elements
    case |= {"source": case["target"], "target": str(tmp_path / "tp2")}
    for found in crew.run(world=2, action=f"{WHOLE}:resumed", parallel={"tensor": 2}, **case):
        assert found["before"].keys() == expected["before"].keys()
        for name, weight in found["after"].items():
            assert torch.equal(found["before"][name], expected["before"][name])
            torch.testing.assert_close(weight, expected["after"][name], rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("world", "parallel", "rank", "tensor"),
    [
        (2, {}, 1, "decoder.layers.2.mlp.linear_fc1.weight"),
        (2, {"context": 2}, 1, "embedding.word_embeddings.weight"),
        (2, {"tensor": 2}, 1, "decoder.final_layernorm.weight"),
        (2, {"pipeline": 2}, 1, "embedding.word_embeddings.weight"),
        (4, {"tensor": 2}, 2, "decoder.layers.0.mlp.linear_fc2.weight"),
    ],
)
def test_a_rank_with_another_weight_is_named_on_every_rank(
    crew: Any, make_model: Any, world: int, parallel: dict[str, int], rank: int, tensor: str
) -> None:
    path = make_model("qwen3", vocab_size=VOCAB, num_hidden_layers=4, tie_word_embeddings=True)
    found = crew.run(
        world=world, action="disagree", model=str(path), parallel=parallel, rank=rank, tensor=tensor
    )
    assert {result.text for result in found} == {found[0].text}
    assert "AG604" in found[0].text
    assert f"{tensor} (rank" in found[0].text


def test_a_rank_that_the_system_ends_is_an_error_with_stacks(crew: Any) -> None:
    told = r"rank 1 has ended with status -11(.|\n)*Segmentation fault(.|\n)*in fault"
    with pytest.raises(pytest.fail.Exception, match=told):
        crew.run(world=2, action="fault")


def test_a_rank_that_hangs_is_an_error_with_stacks(crew: Any) -> None:
    """Let the tests' own deadline end a hung rank; the next case has new processes."""
    with pytest.raises(pytest.fail.Exception, match=r"has not answered within(.|\n)*in hang"):
        crew.run(world=2, action="hang", limit_s=5.0)
