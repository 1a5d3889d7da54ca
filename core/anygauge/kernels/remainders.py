"""Float32 weights split into the model's bfloat16 weights and the missing 16 bits.

The upper half of a float32 number is a bfloat16 number, so that a rank that has the model's weights needs the
lower halves alone. Read as int16, a half of 0x8000 or more is negative and the upper half is one more: the
bits of the number are those of the weight times 2**16, plus the remainder, and the weight is the number
rounded to nearest. Ties must go away from zero: to even, some would leave 0x8000, which int16 has not.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join", "split"]


def join(weights: Tensor, remainders: Tensor) -> Tensor:
    """Return the float32 numbers that :func:`split` was given.

    :param weights: bfloat16, of any shape.
    :param remainders: int16, of the same shape.
    """
    bits = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainders).view(torch.float32)


def split(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weights and the int16 remainders of float32 numbers.

    Every number comes back to the bit, also infinities and -0. A NaN comes back as the NaN of one pattern:
    others would round to infinity or to 0, and the model would not show them.
    """
    bits = numbers.masked_fill(numbers.isnan(), torch.nan).view(torch.int32)
    remainders = bits.to(torch.int16)
    weights = bits.add_(0x8000).bitwise_right_shift_(16).to(torch.int16)
    return weights.view(torch.bfloat16), remainders
