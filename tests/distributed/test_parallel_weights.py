"""Weights go into ranks that divide them and come back whole; what does not fit is an error on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

LAYERS = 4
CASES = Path(__file__).with_name("weight_cases.py")
DIVISIONS: list[dict[str, int]] = [
    {},
    {"tensor": 2},
    {"tensor": 2, "stages": 2},
    {"stages": 2, "expert": 2},
    {"tensor": 2, "stages": 2, "expert_tensor": 2},
    {"stages": 4},
    {"tensor": 2, "expert": 2, "expert_tensor": 2},
    {"expert": 4},
]


@pytest.mark.parametrize("sizes", DIVISIONS, ids=str)
def test_what_ranks_divide_comes_back_whole(crew: Any, sizes: dict[str, int]) -> None:
    found = crew.run(world=4, action=f"{CASES}:load_and_gather", sizes=sizes)
    for rank, (expected, everywhere, first, sent, ranks) in enumerate(found):
        assert len(ranks) == copy_size(sizes)
        assert rank in ranks
        for tensors in (everywhere, first) if rank == 0 else (everywhere,):
            assert tensors.keys() == expected.keys()
            assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []
        assert rank == 0 or not first
        assert all(rank == sender or not tensors for sender, tensors in sent.items())
        of_copy = [found[each][3][each] for each in sent]
        assert sorted(name for tensors in of_copy for name in tensors) == sorted(expected)
        assert all(torch.equal(expected[name], each) for part in of_copy for name, each in part.items())
        experts = {name for name in of_copy[0] if name.startswith("gu.")}
        assert len(of_copy) == sizes.get("stages", 1), "a stack of all experts is one tensor"
        assert len(experts) == LAYERS // sizes.get("stages", 1)


def copy_size(sizes: dict[str, int]) -> int:
    """Return how many ranks hold one copy of the model."""
    experts = sizes.get("expert", 1) * sizes.get("expert_tensor", 1)
    return sizes.get("stages", 1) * max(sizes.get("tensor", 1), experts)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"stages": 4}], ids=str)
def test_what_one_rank_lacks_is_an_error_on_all(crew: Any, sizes: dict[str, int]) -> None:
    messages = ("norm: ", "q.3: missing in the checkpoint", "d.3: ")
    for errors in crew.run(world=4, action=f"{CASES}:refuse", sizes=sizes):
        for (text, is_unchanged), message in zip(errors, messages, strict=True):
            assert message in text
            assert is_unchanged
