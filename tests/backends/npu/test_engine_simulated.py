"""The train engine on two simulated NPUs over ProcessGroupHCCL: the digits of the host's over gloo.

Both train with the reference kernels, so that the same sums are taken in the same order and every digit can
be compared. It shows that tensors, collectives and Megatron's own device code are where they belong; never
an Ascend's numerics. The cases are those of ``tests/distributed``.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(300)]

DISTRIBUTED = Path(__file__).parents[2] / "distributed"
FIXTURES = runpy.run_path(str(DISTRIBUTED / "conftest.py"))
MODES = runpy.run_path(str(DISTRIBUTED / "test_parallel_modes.py"))
CHECKPOINTS = str(DISTRIBUTED / "checkpoint_cases.py")
RANKS = 2
VOCAB = 63
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp2": ("tied", {}, {}),
    "dp2-overlap-recompute": ("tied", {}, {**MODES["OVERLAP"], "recompute": "full"}),
    "tp2-sp": ("untied", {"tensor": 2}, {"recompute": "selective"}),
    "pp2": ("tied", {"pipeline": 2}, {}),
    "vpp2-overlap": ("tied", {"pipeline": 2, "virtual_pipeline": 2}, MODES["OVERLAP"]),
    "cp2": ("tied", {"context": 2}, {"recompute": "full"}),
    "ep2": ("experts", {"expert": 2}, {}),
}

Train = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def crews(two_devices: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    """Return ranks on the host and on simulated NPUs, which take one case after the other."""
    assert two_devices["TORCH_NPU_FALLBACK_CPU_DISABLE"] == "1", "an operator without a kernel is an error"
    Crew = FIXTURES["Crew"]
    with tempfile.TemporaryDirectory() as host, tempfile.TemporaryDirectory() as npu:
        found = {
            "cpu": Crew(Path(host), size=RANKS),
            "npu": Crew(Path(npu), "npu", size=RANKS, environ=two_devices),
        }
        yield found
        for crew in found.values():
            crew.close()
            crew.cool()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a tiny model by its name among those of the parallel tests."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            family, changes = MODES["MODELS"][name]
            made[name] = tmp_path_factory.mktemp(name)
            shape = {"vocab_size": VOCAB, "num_hidden_layers": 4, **changes}
            with pytest.MonkeyPatch.context() as patch:
                hide_torch_npu(patch)
                FIXTURES["write_model"](made[name], family, shape, 0)
        return made[name]

    return make


def hide_torch_npu(patch: pytest.MonkeyPatch) -> None:
    """Let transformers, which this process needs without a device, take torch-npu for absent."""
    patch.setitem(sys.modules, "torch_npu", None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def train(crews: Mapping[str, Any], model: Callable[[str], Path]) -> Train:
    def run(backend: str, name: str, **case: Any) -> list[Any]:
        case = {"world": RANKS, "action": "train", **case}
        found: list[Any] = crews[backend].run(model=str(model(name)), vocab=VOCAB, **case)
        return found

    return run


@pytest.mark.parametrize("mode", CASES)
def test_every_digit_is_the_hosts(train: Train, mode: str) -> None:
    name, parallel, settings = CASES[mode]
    host, npu = (
        train(backend, name, parallel=parallel, train=settings, references=True) for backend in ("cpu", "npu")
    )
    for rank, (one, other) in enumerate(zip(host, npu, strict=True)):
        assert not hasattr(other, "text"), other.text
        assert other["whereabouts"] == {"devices": {f"npu:{rank}"}, "backends": {"hccl"}}
        assert one["whereabouts"] == {"devices": {"cpu"}, "backends": {"gloo"}}
        assert other["division"] == one["division"]
        assert other["metrics"] == one["metrics"]
        for key in ("before", "after", "weights"):
            assert_same_bits(other[key], one[key])


def assert_same_bits(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
