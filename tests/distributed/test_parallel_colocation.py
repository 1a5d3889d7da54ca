"""Models that are divided among processes, between whose steps everything is given up and taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10_000}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2-overlap": ("qwen3", {"train": {"megatron": OVERLAP}}),
    "dp2-remainders": ("qwen3", {"train": {"dtype": "bfloat16"}, "joins": True}),
    "tp2": ("qwen3", {"parallel": {"tensor": 2}}),
    "cp2": ("qwen3", {"parallel": {"context": 2}}),
    "ep2": ("qwen3_moe", {"parallel": {"expert": 2}}),
    "pp2": ("qwen3", {"parallel": {"pipeline": 2}}),  # in groups that stay
}
TURNS = ("weights", "nothing", "weights", "everything")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_those_of_an_actor_that_kept_its_memory(layout: str, crew: Any, make_model: Any) -> None:
    family, divided = LAYOUTS[layout]
    model = make_model(family, vocab_size=63)
    case = {"world": 2, "action": "take_turns", "model": str(model), "vocab": 63, **divided}
    plain = crew.run(**case, turns=())
    sleeping = crew.run(**case, turns=TURNS)
    for one, other in zip(plain, sleeping, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["weights"].keys() == other["weights"].keys()
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())
