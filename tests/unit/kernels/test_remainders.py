"""Float32 weights as bfloat16 weights and remainders: each number comes back, and the weight is nearest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anygauge.kernels.remainders import join, split

INT32_MIN = -(2**31)


@pytest.fixture(scope="module")
def numbers() -> Tensor:
    """Return all bfloat16 numbers with lower halves of every kind."""
    lower = torch.cat([torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]), torch.randint(2**16, (26,))])
    upper = torch.arange(INT32_MIN, -INT32_MIN, 2**16)
    return (upper[:, None] + lower).int().view(torch.float32)


def test_every_number_comes_back_to_the_bit(numbers: Tensor) -> None:
    before = numbers.clone()
    weights, remainders = split(numbers)
    assert (weights.dtype, remainders.dtype) == (torch.bfloat16, torch.int16)
    real = ~numbers.isnan()
    joined = join(weights, remainders)
    assert joined.view(torch.int32)[real].equal(numbers.view(torch.int32)[real])
    assert numbers.view(torch.int32).equal(before.view(torch.int32))


def test_a_nan_is_one_in_the_model_too(numbers: Tensor) -> None:
    weights, remainders = split(numbers)
    for each in (weights, join(weights, remainders)):
        assert each.isnan().equal(numbers.isnan())


def test_weights_are_rounded_to_nearest_and_ties_away_from_zero(numbers: Tensor) -> None:
    weights, _ = split(numbers)
    ties = (numbers.view(torch.int32) & 0xFFFF) == 0x8000
    real = ~numbers.isnan()
    assert weights[real & ~ties].equal(numbers[real & ~ties].bfloat16())
    finite = ties & weights.isfinite()
    assert (weights[finite].float().abs() > numbers[finite].abs()).all()
