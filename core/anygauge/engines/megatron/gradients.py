"""Main gradients: their state before a step's first backward pass and after its last.

Megatron writes zeros to all of them. The gradient of a linear's weight comes from products alone, of which
the first can take the place of what is there: zeros would be written and read for nothing, 8 bytes of traffic
for each number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from anygauge.kernels.main_grad import FIRST

__all__ = ["begin_gradients", "complete_gradients", "main_gradients", "replace_first"]

_REPLACES = "main_grad_is_replaced"


def replace_first(weight: Tensor) -> None:
    """Declare that all of a weight's gradient comes from ``weight_gradient``."""
    setattr(weight, _REPLACES, True)


def begin_gradients(chunks: Iterable[Any]) -> None:
    """Forget the gradients of the step before, as ``zero_grad_buffer`` of each wrapped chunk does."""
    for chunk in chunks:
        zeroed: list[Tensor] = []
        for weight in chunk.params_with_grad:
            weight.grad_added_to_main_grad = False
            if hasattr(weight, _REPLACES):
                setattr(weight, FIRST, True)
            else:
                zeroed.append(weight.main_grad)
        if zeroed:
            torch._foreach_zero_(zeroed)
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.reset()


def complete_gradients(chunks: Iterable[Any]) -> None:
    """Write zeros to the gradients of unused weights."""
    for chunk in chunks:
        for weight in chunk.params_with_grad:
            if vars(weight).pop(FIRST, False):
                weight.main_grad.zero_()


def main_gradients(chunks: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the buffers of the gradients of chunks that Megatron has wrapped for data parallelism."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
