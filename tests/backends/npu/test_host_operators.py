"""The host versions of torch-npu's operators refuse what the operators' documentation does not allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simulation.operators import OPERATORS

MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attend(**options: Any) -> Any:
    """Attend over sequences of 3 and 2 tokens, but for what is given."""
    q, k, v = (options.pop(name, torch.ones(5, heads, 16)) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    given = {"head_num": 4, "input_layout": "TND", "actual_seq_qlen": [3, 5], "actual_seq_kvlen": [3, 5]}
    return OPERATORS["npu_fusion_attention"](
        q, k, v, **{**given, "atten_mask": MASK, "sparse_mode": 3, **options}
    )


def group(x: Tensor, weight: Tensor, ends: list[int], kind: int = 0, **options: Any) -> Any:
    options = {"split_item": 3, "group_type": kind, "group_list": torch.tensor(ends), **options}
    return OPERATORS["npu_grouped_matmul"]([x], [weight], **options)


def turn(x: Tensor, angles: Tensor) -> Any:
    return OPERATORS["npu_rotary_mul"](x, angles, angles)


def permute(chosen: Tensor, **options: Any) -> Any:
    given = {"probs": torch.ones(chosen.shape), "num_out_tokens": 6, **options}
    return OPERATORS["npu_moe_token_permute_with_routing_map"](torch.ones(3, 8), chosen, **given)


ALL = torch.ones(3, 2, dtype=torch.bool)
RIGHT: dict[str, Callable[[], Any]] = {
    "attention": attend,
    "attention to all": lambda: attend(sparse_mode=0, atten_mask=None),
    "attention within a window": lambda: attend(sparse_mode=4, pre_tockens=1, next_tockens=0),
    "attention with sinks": lambda: attend(sink=torch.ones(4)),
    "attention of a suffix": lambda: attend(q=torch.ones(3, 4, 16), actual_seq_qlen=[1, 3]),
    "rows": lambda: group(torch.ones(5, 4), torch.ones(2, 4, 3), [2, 5]),
    "rows of a transposed weight": lambda: group(torch.ones(5, 4), torch.ones(2, 3, 4).mT, [2, 5]),
    "inner": lambda: group(torch.ones(5, 4).t(), torch.ones(5, 3), [2, 5], 2),
    "counts": lambda: group(torch.ones(5, 4), torch.ones(2, 4, 3), [2, 3], group_list_type=1),
    "rotation": lambda: turn(torch.ones(1, 5, 2, 8), torch.ones(1, 5, 1, 8)),
    "permutation": lambda: permute(ALL),
}
WRONG: dict[str, Callable[[], Any]] = {
    "a 0 in front": lambda: attend(actual_seq_qlen=[0, 3, 5], actual_seq_kvlen=[0, 3, 5]),
    "lengths": lambda: attend(actual_seq_qlen=[3, 2], actual_seq_kvlen=[3, 2]),
    "too few tokens": lambda: attend(actual_seq_qlen=[3, 4], actual_seq_kvlen=[3, 4]),
    "lengths on the device": lambda: attend(actual_seq_qlen=torch.tensor([3, 5])),
    "no lengths": lambda: attend(actual_seq_qlen=None),
    "mask of what is seen": lambda: attend(atten_mask=~MASK),
    "mask of numbers": lambda: attend(atten_mask=MASK.float()),
    "whole mask": lambda: attend(atten_mask=MASK[:5, :5]),
    "no mask": lambda: attend(atten_mask=None),
    "mask without a mode": lambda: attend(sparse_mode=0),
    "more queries than keys": lambda: attend(
        k=torch.ones(3, 2, 16), v=torch.ones(3, 2, 16), actual_seq_kvlen=[1, 3]
    ),
    "a band into the future": lambda: attend(sparse_mode=4, pre_tockens=1, next_tockens=1),
    "sinks of key heads": lambda: attend(sink=torch.ones(2)),
    "half sinks": lambda: attend(sink=torch.ones(4).half()),
    "other layout": lambda: attend(input_layout="BSND"),
    "other heads": lambda: attend(head_num=2),
    "heads that do not divide": lambda: attend(k=torch.ones(5, 3, 16), v=torch.ones(5, 3, 16)),
    "wider values": lambda: attend(v=torch.ones(5, 2, 32)),
    "float64": lambda: attend(
        **{name: torch.ones(5, heads, 16).double() for name, heads in {"q": 4, "k": 2, "v": 2}.items()}
    ),
    "ends that fall": lambda: group(torch.ones(5, 4), torch.ones(2, 4, 3), [5, 2]),
    "ends before the end": lambda: group(torch.ones(5, 4), torch.ones(2, 4, 3), [2, 4]),
    "one count": lambda: group(torch.ones(5, 4), torch.ones(1, 4, 3), [5], group_list_type=1),
    "groups of columns": lambda: group(torch.ones(5, 4), torch.ones(2, 4, 3), [2, 5], 1),
    "several results": lambda: group(torch.ones(5, 4), torch.ones(2, 4, 3), [2, 5], split_item=0),
    "transposed rows": lambda: group(torch.ones(4, 5).t(), torch.ones(2, 4, 3), [2, 5]),
    "inner that is not transposed": lambda: group(torch.ones(4, 5), torch.ones(5, 3), [2, 5], 2),
    "rotation of 3 dimensions": lambda: turn(torch.ones(5, 2, 8), torch.ones(5, 1, 8)),
    "rotation of an odd width": lambda: turn(torch.ones(1, 5, 2, 7), torch.ones(1, 5, 1, 7)),
    "rotation of a wide head": lambda: turn(torch.ones(1, 1, 1, 896), torch.ones(1, 1, 1, 896)),
    "rotation by other positions": lambda: turn(torch.ones(1, 5, 2, 8), torch.ones(1, 4, 1, 8)),
    "rotation by two dtypes": lambda: turn(torch.ones(1, 5, 2, 8), torch.ones(1, 5, 1, 8).half()),
    "tokens of fewer experts": lambda: permute(torch.eye(3, 2).bool()),
    "half probabilities": lambda: permute(ALL, probs=torch.ones(3, 2).half()),
    "map of numbers": lambda: permute(ALL.float()),
    "rows that are twice there": lambda: OPERATORS["npu_moe_token_unpermute"](
        torch.ones(2, 8), torch.zeros(2, dtype=torch.int32)
    ),
    "rows in int64": lambda: OPERATORS["npu_moe_token_unpermute"](torch.ones(2, 8), torch.arange(2)),
    "odd swiglu": lambda: OPERATORS["npu_swiglu"](torch.ones(2, 7)),
    "norm of a vector": lambda: OPERATORS["npu_rms_norm"](torch.ones(8), torch.ones(8)),
    "norm of another width": lambda: OPERATORS["npu_rms_norm"](torch.ones(2, 8), torch.ones(4)),
    "norm of strides": lambda: OPERATORS["npu_rms_norm"](torch.ones(8, 2).t(), torch.ones(8)),
    "more than all experts": lambda: OPERATORS["npu_moe_gating_top_k_softmax"](torch.ones(2, 4), k=5),
    "bias of another dtype": lambda: OPERATORS["npu_moe_gating_top_k"](
        torch.ones(2, 4), 2, bias=torch.ones(4).half(), norm_type=1
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_call_that_the_documentation_allows_runs(name: str) -> None:
    RIGHT[name]()


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_the_documentation_excludes_fails(name: str) -> None:
    with pytest.raises(AssertionError):
        WRONG[name]()


def test_statistics_lie_head_by_head_within_each_sequence() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, heads, 16) for heads in (4, 2, 2))
    _, peak, _, *_ = attend(q=q, k=k, v=v, sparse_mode=0, atten_mask=None)
    scores = torch.einsum("qhd,khd->hqk", q[3:], k[3:].repeat_interleave(2, 1))
    second = peak.flatten()[3 * 4 * 8 :].view(4, 2, 8)
    torch.testing.assert_close(second, scores.amax(-1, keepdim=True).expand(-1, -1, 8))
