"""LoRA on a divided Megatron model: steps, files, checkpoints and references are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

CASES = Path(__file__).with_name("lora_cases.py")
VOCAB = 63
"""No multiple of 2, so that tensor parallelism pads it."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": (
        "qwen3",
        {"tie_word_embeddings": False},
        {"rank": 3, "alpha": 9.0, "modules_to_save": ["lm_head", "norm"]},
    ),
    "one-layer": ("qwen3", {"tie_word_embeddings": True}, {"rank": 3, "targets": r"model\.layers\.1\..*"}),
    "latent": ("deepseek_v3", {"initializer_range": 0.1}, {"rank": 3}),
    "delta": (
        "qwen3_next",
        {"layer_types": ["linear_attention", "full_attention"] * 2, "initializer_range": 0.1},
        {"rank": 3},
    ),
}
"""Family, keys of its config, and ``train.lora``."""
MODES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "tp2-pp2": ("dense", 4, {"tensor": 2, "pipeline": 2}, {"recompute": "full"}),
    "tp2-cp2": ("dense", 4, {"tensor": 2, "context": 2, "sequence": False}, {}),
    "dp2-vpp2-overlap": ("dense", 4, {"pipeline": 2, "virtual_pipeline": 2}, {"megatron": OVERLAP}),
    "pp2-one-layer": ("one-layer", 2, {"pipeline": 2}, {}),
    "latent-tp2-ep2": ("latent", 2, {"tensor": 2, "expert": 2}, {"recompute": "elementwise"}),
    "delta-tp2": ("delta", 2, {"tensor": 2}, {}),
}


class Runs:
    """Runs of a model; each leaves an export and a checkpoint."""

    def __init__(self, crew: Any, make_model: Any, directory: Path) -> None:
        self._crew, self._make_model, self._directory = crew, make_model, directory
        self._known: dict[str, Any] = {}

    def run(self, action: str, model: str, world: int = 1, *, train: Any = None, **case: Any) -> list[Any]:
        family, changes, lora = MODELS[model]
        path = self._make_model(family, vocab_size=VOCAB, num_hidden_layers=4, **changes)
        results: list[Any] = self._crew.run(
            world=world,
            action=f"{CASES}:{action}",
            model=str(path),
            vocab=VOCAB,
            train={"lr": 0.02, "lora": {**lora, "export": "adapter"}, **(train or {})},
            **case,
        )
        for rank, result in enumerate(results):
            assert not hasattr(result, "text"), f"rank {rank}: {getattr(result, 'text', '')}"
        return results

    def trained(self, name: str, model: str, world: int = 1, **case: Any) -> tuple[Path, list[Any]]:
        """Return where a run has left its files, and what its ranks had; one of one process is kept."""
        target = self._directory / name
        target.mkdir(exist_ok=True)
        if name not in self._known:
            self._known[name] = self.run("trained", model, world, target=str(target), **case)
        return target, self._known[name]


@pytest.fixture(scope="module")
def runs(crew: Any, make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(crew, make_model, tmp_path_factory.mktemp("lora"))


def assert_close(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor], atol: float = 2e-5) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=str(name))


def check_steps(results: list[Any], expected: Any) -> None:
    for result in results:
        for key in {"metrics", "last"} & result.keys():
            for step, wanted in zip(result[key], expected[key], strict=True):
                assert step == pytest.approx(wanted, rel=2e-5, abs=1e-5)
        assert_close(result["before"], expected["before"])
        assert_close(result["after"], expected["after"])
    sent = {name: tensor for result in results for name, tensor in result["sent"].items()}
    assert_close(sent, results[0]["after"], atol=0)
    for role in ("actor", "reference"):
        said = {key: value for result in results for key, value in result[role].items()}
        assert_close(said, expected[role], atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_divided_model_trains_its_adapters_like_a_whole_one(runs: Runs, mode: str) -> None:
    model, world, parallel, train = MODES[mode]
    directory, results = runs.trained(mode, model, world, parallel=parallel, train=train)
    alone, (expected,) = runs.trained(model, model)
    check_steps(results, expected)
    moved = {name for name, tensor in expected["after"].items() if not tensor.equal(expected["base"][name])}
    assert moved
    assert {name for result in results for name in result["learning"]} == set(expected["learning"])
    file = "adapter/adapter_model.safetensors"
    assert_close(load_file(directory / file), load_file(alone / file))


def test_an_adapter_is_not_divided_within_a_query_group(crew: Any, make_model: Any) -> None:
    path = make_model("qwen3", vocab_size=VOCAB, num_hidden_layers=4, tie_word_embeddings=False)
    case = {"action": "train", "model": str(path), "vocab": VOCAB, "parallel": {"tensor": 4}}
    results = crew.run(world=4, **case, train={"lora": {"rank": 3}})
    for result in results:
        assert "train.parallel.tensor = 4 is more than the 2 query groups" in result.text
    results = crew.run(
        world=4, **case, steps=1, train={"lora": {"rank": 3, "targets": ["o_proj", "up_proj"]}}
    )
    assert results[0]["metrics"] == results[3]["metrics"]


def test_another_layout_takes_the_same_step(runs: Runs) -> None:
    """A checkpoint of adapters is read by ranks that divide them in another way, on the same base."""
    model, world, parallel, train = MODES["tp2-pp2"]
    source, _ = runs.trained("tp2-pp2", model, world, parallel=parallel, train=train)
    _, (expected,) = runs.trained(model, model)
    for world, parallel in ((2, {}), (2, {"pipeline": 2})):
        results = runs.run("resumed", model, world, parallel=parallel, source=str(source / "checkpoint"))
        check_steps(results, expected)
