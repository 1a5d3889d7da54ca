"""Optimizers of the host that take gradients and copies with their step, as a backend may make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anygauge.kernels.remainders import join, split
from anygauge_hooks.optimizers import FusedOptimizer

__all__ = ["Joining", "Rounding", "Taking", "taking"]


class Taking(torch.optim.AdamW, FusedOptimizer):
    """Torch's optimizer with the methods of the contract."""

    steps = 0
    """How often the method was called."""

    def step_from(
        self, gradients: Sequence[Sequence[Tensor]], scale: float, copies: Sequence[Sequence[Tensor | None]]
    ) -> None:
        """Take a step."""
        self.steps += 1
        for group, mine in zip(self.param_groups, gradients, strict=True):
            for weight, gradient in zip(group["params"], mine, strict=True):
                weight.grad = gradient * scale
        self.step()
        for group, theirs in zip(self.param_groups, copies, strict=True):
            for weight, copy in zip(group["params"], theirs, strict=True):
                weight.grad = None
                if copy is not None:
                    self.write(copy, weight)

    def write(self, copy: Tensor, weight: Tensor) -> None:
        """Write a new weight to the model."""
        copy.copy_(weight)


class Rounding(Taking):
    """One that rounds ties of the copies as if the weights were remainders."""

    def write(self, copy: Tensor, weight: Tensor) -> None:
        """Write a new weight to the model."""
        copy.copy_(split(weight)[0])


class Joining(Rounding):
    """One whose weights may be remainders."""

    takes_remainders = True

    def step_from(
        self, gradients: Sequence[Sequence[Tensor]], scale: float, copies: Sequence[Sequence[Tensor | None]]
    ) -> None:
        """Take a step on float32 weights, which are whole for as long as it takes."""
        whole = []
        for group, theirs in zip(self.param_groups, copies, strict=True):
            for weight, copy in zip(group["params"], theirs, strict=True):
                if weight.dtype == torch.int16:
                    assert copy is not None
                    weight.data = join(copy, weight)
                    whole.append(weight)
        super().step_from(gradients, scale, copies)
        for weight in whole:
            weight.data = split(weight.data)[1]


def taking(
    param_groups: Sequence[Mapping[str, Any]], *, kind: type[Taking] = Taking, **settings: Any
) -> Taking:
    """Return one of a kind, with the signature of the hook."""
    return kind([dict(group) for group in param_groups], **settings, fused=True)
