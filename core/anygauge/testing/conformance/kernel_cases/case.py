"""One call of a kernel op, as the conformance suite makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anygauge_hooks.kernels import KernelOp

__all__ = ["CHUNKS", "MANY", "RAGGED", "USUAL", "Case", "normal", "shape_name"]

RAGGED = (3, 1, 0, 7, 12, 1, 33, 0, 8, 5)
"""Lengths of packed sequences, with empty ones and some of one token."""

CHUNKS = (63, 64, 65, 0, 128, 1)
"""Lengths around the multiples that kernels work in."""

USUAL = 1_030, 640
"""Rows and columns of a tensor as training has it: both are more than a block of a kernel."""

MANY = 66_000
"""Rows of a large tensor: more than 65,535, the limit of a launch grid in two of its dimensions."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One call of an op. Tensors are made on the host in float64."""

    op: KernelOp
    name: str
    tensors: Callable[[], tuple[Tensor, ...]]
    differentiable: int
    """Number of tensors, from the first, that get a gradient; these take the dtype under test."""
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    wide: tuple[int, ...] = ()
    """Indices of tensors that are float32 in every dtype under test."""
    wide_outputs: tuple[int, ...] = ()
    """Indices of outputs that are float32 in every dtype under test."""
    exact_outputs: tuple[int, ...] = ()
    """Indices of ``wide_outputs`` that are computed in float32 from the inputs as they are."""
    rounded_once: tuple[str, ...] = ()
    """``"outputs"`` or ``"gradients"``, where the op is defined as computed in float32 and then rounded."""
    keyword: str | None = None
    """Name of the last tensor, where the op takes it by keyword."""
    on_host: tuple[int, ...] = ()
    """Indices of tensors that stay on the host, where the op takes them on any device."""
    settle: Callable[..., tuple[Tensor, ...]] = lambda *outputs: outputs
    """Checks and normalizes outputs that the op leaves some freedom."""
    in_one_dtype: bool = False
    """Whether a kernel is tried in one of its dtypes only: in bfloat16, if it has that."""

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def normal(*shape: int) -> Tensor:
    """Return normally distributed float64 numbers."""
    return torch.randn(shape, dtype=torch.float64)


def shape_name(shape: tuple[int, ...]) -> str:
    """Return a shape for the name of a case."""
    return "x".join(map(str, shape))
