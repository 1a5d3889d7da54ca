"""An optimizer of the host that takes gradients and copies with its step, as a backend may make one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Taking", "taking"]


class Taking(torch.optim.AdamW):
    """Torch's optimizer with the method of the contract."""

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
                    copy.copy_(weight)


def taking(param_groups: Sequence[Mapping[str, Any]], **settings: Any) -> Taking:
    """Return one with the signature of the hook."""
    return Taking([dict(group) for group in param_groups], **settings, fused=True)
