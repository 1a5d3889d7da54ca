"""Attention of Qwen3-8B's shape on a real NPU, against float64 on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anygauge.kernels import reference

pytestmark = [pytest.mark.npu_hw, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128
TOLERANCE = 2e-2
"""Tolerance of bfloat16, whose eight bits give 4e-3 of each number, through two products and a softmax."""


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "lengths", [(1,), (7, 512, 1), (1000, 24)], ids=["one token", "ragged", "longer than a block of the mask"]
)
def test_it_is_the_references(npu: Any, kernels: Any, lengths: tuple[int, ...], causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator)

    attend = kernels.resolve("varlen_attention", dtype="bfloat16", head_dim=HEAD_DIM, causal=causal)
    inputs, gradient = [draw(HEADS), draw(KEY_HEADS), draw(KEY_HEADS)], draw(HEADS)
    found = outcome(attend, inputs, gradient, lengths, causal, npu.torch_device, torch.bfloat16)
    rounded = [each.bfloat16() for each in (*inputs, gradient)]
    expected = outcome(
        reference.varlen_attention,
        rounded[:3],
        rounded[3],
        lengths,
        causal,
        torch.device("cpu"),
        torch.float64,
    )
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        error = (one - other).abs().max().item() / max(1.0, other.abs().max().item())
        assert error < TOLERANCE, name


def outcome(
    attend: Any,
    inputs: list[torch.Tensor],
    gradient: torch.Tensor,
    lengths: tuple[int, ...],
    causal: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return output and gradients as float64 on the host."""
    leaves = [each.to(device, dtype).requires_grad_() for each in inputs]
    output = attend(*leaves, list(lengths), HEAD_DIM**-0.5, causal=causal)
    output.backward(gradient.to(device, dtype))
    return [each.detach().double().cpu() for each in (output, *(leaf.grad for leaf in leaves))]
