"""AdamW over many tensors in one launch: each number is read and written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Plan", "Rates", "launch", "plan"]

BLOCK = 1024
CHUNK = 32 * BLOCK
"""Numbers of one tensor that a program updates, a block at a time."""

WARPS = 8
ALIGNMENT = 16
"""Bytes at whose multiples every tensor must start for loads of several numbers at once."""


class Rates(NamedTuple):
    """Optimizer constants of one launch."""

    fresh1: float
    """``1 - beta1``, which rounded numbers would not give."""
    beta2: float
    fresh2: float
    eps: float
    decay: float
    """Factor of a weight."""
    rate: float
    """The learning rate over ``1 - beta1 ** step``."""
    root: float
    """``sqrt(1 - beta2 ** step)``"""
    scale: float
    """Factor of a gradient."""


@triton.jit
def _adamw(
    addresses: tl.tensor,
    sizes: tl.tensor,
    owners: tl.tensor,
    places: tl.tensor,
    fresh1: float,
    beta2: float,
    fresh2: float,
    eps: float,
    decay: float,
    rate: float,
    root: float,
    scale: float,
    ALIGNED: tl.constexpr,
    COPIES: tl.constexpr,
    REMAINDERS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a chunk of one tensor. ``addresses`` has five numbers of each."""
    owner = tl.load(owners + tl.program_id(0)).to(tl.int64)
    first = tl.load(places + tl.program_id(0)).to(tl.int64) * CHUNK
    size = tl.load(sizes + owner) - first
    table = addresses + owner * 5
    weights = _pointer(table, tl.int16 if REMAINDERS else tl.float32, ALIGNED) + first
    gradients = _pointer(table + 1, tl.float32, ALIGNED) + first
    averages = _pointer(table + 2, tl.float32, ALIGNED) + first
    squares = _pointer(table + 3, tl.float32, ALIGNED) + first
    copies = _pointer(table + 4, tl.int16 if REMAINDERS else tl.bfloat16, ALIGNED) + first
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= size:  # without a mask, several numbers are moved at once
            gradient = tl.load(gradients + at) * scale
            average = _average(tl.load(averages + at), gradient, fresh1)
            square = _square(tl.load(squares + at), gradient, beta2, fresh2)
            weight = _load(weights + at, copies + at, None, REMAINDERS)
            weight = _weight(weight, average, square, eps, decay, rate, root)
            tl.store(averages + at, average)
            tl.store(squares + at, square)
            _store(weights + at, copies + at, weight, None, COPIES, REMAINDERS)
        elif start < size:
            here = at < size
            gradient = tl.load(gradients + at, mask=here) * scale
            average = _average(tl.load(averages + at, mask=here), gradient, fresh1)
            square = _square(tl.load(squares + at, mask=here), gradient, beta2, fresh2)
            weight = _load(weights + at, copies + at, here, REMAINDERS)
            weight = _weight(weight, average, square, eps, decay, rate, root)
            tl.store(averages + at, average, mask=here)
            tl.store(squares + at, square, mask=here)
            _store(weights + at, copies + at, weight, here, COPIES, REMAINDERS)


@triton.jit
def _pointer(place: tl.tensor, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(place).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(weights: tl.tensor, copies: tl.tensor, here: tl.tensor, REMAINDERS: tl.constexpr):
    weight = tl.load(weights, mask=here)
    if REMAINDERS:
        upper = tl.load(copies, mask=here).to(tl.int32) << 16
        weight = (upper + weight).to(tl.float32, bitcast=True)
    return weight


@triton.jit
def _store(
    weights: tl.tensor,
    copies: tl.tensor,
    weight: tl.tensor,
    here: tl.tensor,
    COPIES: tl.constexpr,
    REMAINDERS: tl.constexpr,
):
    if REMAINDERS:
        # A NaN that the device made has all bits set but the sign, and would round to -0.
        bits = tl.where(weight == weight, weight.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(weights, bits.to(tl.int16), mask=here)
        tl.store(copies, ((bits + 0x8000) >> 16).to(tl.int16), mask=here)
    else:
        tl.store(weights, weight, mask=here)
        if COPIES:
            tl.store(copies, weight.to(tl.bfloat16), mask=here)


@triton.jit
def _average(average: tl.tensor, gradient: tl.tensor, fresh: float):
    return average + fresh * (gradient - average)


@triton.jit
def _square(square: tl.tensor, gradient: tl.tensor, beta: float, fresh: float):
    return beta * square + fresh * gradient * gradient


@triton.jit
def _weight(
    weight: tl.tensor,
    average: tl.tensor,
    square: tl.tensor,
    eps: float,
    decay: float,
    rate: float,
    root: float,
):
    return weight * decay - rate * average / (tl.sqrt_rn(square) / root + eps)


class Plan(NamedTuple):
    """Tensor addresses and sizes of one launch, on the device."""

    addresses: Tensor
    sizes: Tensor
    owners: Tensor
    """Tensor that each program has a chunk of."""
    places: Tensor
    """Which chunk of that."""
    is_aligned: bool


def plan(updates: Sequence[Sequence[Tensor | None]], addresses: Sequence[int]) -> Plan:
    """Return the pointer tables of a launch over these tensors, valid while none of them moves.

    :param updates: The weight, its gradient, both moments and the copy, contiguous, of so many numbers each.
        The copy is bfloat16 or ``None``; the others are float32, but for a weight that is int16, the lower
        half of the number whose upper half, rounded, is the copy.
    :param addresses: Address of each of these, 0 for none.
    """
    weights = [update[0] for update in updates if update[0] is not None]
    device = weights[0].device
    sizes = torch.tensor([weight.numel() for weight in weights])
    counts = -(-sizes // CHUNK)
    owners = torch.repeat_interleave(torch.arange(len(weights)), counts)
    places = torch.arange(len(owners)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return Plan(
        torch.tensor(addresses).to(device),
        sizes.to(device),
        owners.int().to(device),
        places.int().to(device),
        all(address % ALIGNMENT == 0 for address in addresses),
    )


def launch(plan: Plan, rates: Rates, *, copies: bool, remainders: bool) -> None:
    """Update the tensors of a plan.

    :param copies: Whether each has a copy; either all have one or none.
    :param remainders: Whether the weights are int16, what the copies lack; either all are or none.
    """
    _adamw[(len(plan.owners),)](
        plan.addresses,
        plan.sizes,
        plan.owners,
        plan.places,
        *rates,
        ALIGNED=plan.is_aligned,
        COPIES=copies,
        REMAINDERS=remainders,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
