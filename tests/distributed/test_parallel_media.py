"""A model that sees, divided in every way, gives what one process gives, and goes on from its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.plugins import load_plugins
from anygauge_tests.composed import write_composed
from anygauge_tests.vision_models import write_vision_model

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

OVERLAP = {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1}}
"""A bucket for each weight: whoever reads one has to wait for it."""
CASES = Path(__file__).with_name("media_cases.py")
MODES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "tp2": ("dense", 2, {"tensor": 2, "sequence": False}, {}),
    "tp2-sp": ("dense", 2, {"tensor": 2}, {}),
    "tp2-sp-recompute": ("dense", 2, {"tensor": 2}, {"recompute": "full"}),
    "cp2": ("dense", 2, {"context": 2}, {}),
    "pp2": ("dense", 2, {"pipeline": 2}, {}),
    "pp2-recompute": ("dense", 2, {"pipeline": 2}, {"recompute": "full"}),
    "dp2-overlap": ("dense", 2, {}, OVERLAP),
    "vpp2": ("one-level", 2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "ep2": ("experts", 2, {"expert": 2}, {}),
    "glm-dp2-overlap": ("glm", 2, {}, OVERLAP),  # its tower reads a weight without a call of the module
    "omni-tp2-sp": ("omni", 2, {"tensor": 2}, {}),
    "omni-ep2-overlap": ("omni", 2, {"expert": 2}, OVERLAP),
    "glm-omni-pp2-recompute": ("glm-omni", 2, {"pipeline": 2}, {"recompute": "full"}),
    "glm-omni-cp2": ("glm-omni", 2, {"context": 2}, {}),
    "glm-omni-dp2-overlap": ("glm-omni", 2, {}, OVERLAP),
    "hybrid-tp2-sp": ("hybrid", 2, {"tensor": 2}, {}),
    "hybrid-cp2": ("hybrid", 2, {"context": 2}, {}),
    "tp2-cp2": ("dense", 4, {"tensor": 2, "context": 2}, {}),
}
"""The model, ranks, layout and settings of training. One rank of two has no image in the first step."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    specs = load_plugins().named("register_models")
    found = {}
    for name, family, levels in (
        ("dense", "qwen3_vl", [0, 1]),
        ("one-level", "qwen3_vl", [1]),
        ("experts", "qwen3_vl_moe", [0]),
        ("glm", "glm4v", None),
        ("omni", "qwen3_omni_moe", [0]),
    ):
        tiny = specs[family].tiny()
        changes = {
            "text_config": {**tiny["text_config"], "num_hidden_layers": 2 if "moe" in family else 4},
            "vision_config": dict(tiny["vision_config"]),
        }
        if levels is not None:
            changes["vision_config"]["deepstack_visual_indexes"] = levels
        found[name] = write_vision_model(specs[family], tmp_path_factory.mktemp(name), **changes)
    found["hybrid"] = write_vision_model(specs["qwen3_5"], tmp_path_factory.mktemp("hybrid"))
    tiny = specs["glm_omni"].tiny()
    text = {**tiny["text_config"], "num_hidden_layers": 4}
    found["glm-omni"] = tmp_path_factory.mktemp("glm-omni")
    write_composed(found["glm-omni"], {**tiny, "text_config": text})
    return found


@pytest.fixture(scope="module")
def alone(crew: Any, models: dict[str, Path]) -> Any:
    """Return what one process gives, by the name of the model."""
    known: dict[str, Any] = {}

    def run(model: str) -> Any:
        if model not in known:
            known[model] = crew.run(world=1, action=f"{CASES}:train", model=str(models[model]), vocab=64)[0]
        return known[model]

    return run


LOG_PROBS = {"hybrid": 5e-5}
"""How far log-probs may be from those of one process, if not 1e-5: a recurrence adds roundings up."""


def assert_same(found: list[Any], expected: Any, log_probs: float) -> None:
    """Compare each rank's results with those of one process.

    :param log_probs: How far they may be apart.
    """
    for result in found:
        assert not hasattr(result, "text"), result.text
        for step, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert step == pytest.approx(wanted, rel=1e-5, abs=1e-5), (step, wanted)
        assert_close(result["weights"], expected["weights"])
    for when in ("before", "after"):
        together = {key: value for result in found for key, value in result[when].items()}
        assert_close(together, expected[when], log_probs)


def assert_close(
    actual: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor], atol: float = 1e-5
) -> None:
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=atol, msg=str(key))


@pytest.mark.parametrize("mode", MODES)
def test_a_divided_model_trains_like_a_whole_one(
    crew: Any, models: dict[str, Path], alone: Any, mode: str
) -> None:
    model, world, parallel, train = MODES[mode]
    given = {"model": str(models[model]), "vocab": 64, "parallel": parallel, "train": train}
    found, expected = crew.run(world=world, action=f"{CASES}:train", **given), alone(model)
    assert_same(found, expected, LOG_PROBS.get(model, 1e-5))
    assert sum("visual" in name for name in expected["weights"]) > 20
    for rank, result in enumerate(found):
        is_first = rank < world // parallel.get("pipeline", 1)
        assert any("visual" in name for name in result["division"]["shapes"]) == is_first


def test_levels_that_do_not_fit_the_first_stage_are_refused(crew: Any, models: dict[str, Path]) -> None:
    parallel = {"pipeline": 2, "virtual_pipeline": 2}
    given = {"model": str(models["dense"]), "vocab": 64, "parallel": parallel}
    found = crew.run(world=2, action=f"{CASES}:train", **given)
    assert "first 2 layers, and the first pipeline stage has 1" in found[0].text


@pytest.mark.parametrize(
    ("frozen", "parallel"),
    [("vision", {}), ("language", {}), ("vision", {"pipeline": 2}), ("language", {"pipeline": 2})],
)
def test_frozen_parts_stay_what_they_were(
    crew: Any, models: dict[str, Path], frozen: str, parallel: dict[str, int]
) -> None:
    given = {"model": str(models["dense"]), "vocab": 64, "train": {"freeze": [frozen]} | OVERLAP}
    found = crew.run(world=2, action=f"{CASES}:train", parallel=parallel, **given)
    assert not any(hasattr(each, "text") for each in found), [each.text for each in found]
    before = load_file(models["dense"] / "model.safetensors")
    for result in found:
        changed = {name for name, each in result["weights"].items() if not each.equal(before[name])}
        assert changed
        assert {"visual" in name for name in changed} == {frozen == "language"}


def test_a_checkpoint_goes_on_under_another_layout(
    crew: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    given = {"model": str(models["dense"]), "vocab": 64}
    found = crew.run(
        world=2, action=f"{CASES}:saved", target=str(tmp_path / "one"), parallel={"pipeline": 2}, **given
    )
    again = crew.run(
        world=2,
        action=f"{CASES}:resumed",
        source=str(tmp_path / "one"),
        target=str(tmp_path / "two"),
        parallel={"tensor": 2},
        **given,
    )
    for result in (*found, *again):
        assert not hasattr(result, "text"), result.text
    before, after = ({name: found[0][name], "again": again[0][name]} for name in ("before", "after"))
    assert any("visual" in name for name in before["before"])
    for name, weight in before["before"].items():
        assert torch.equal(weight, before["again"][name]), name
    assert_close(after["again"], after["after"])
    assert again[0]["metrics"][0] == pytest.approx(found[0]["metrics"][0], rel=1e-5, abs=1e-5)
