"""Output recompute: a linear computes its input again in the backward pass instead of keeping it.

What a norm or an activation returns is kept for the linear that follows and for nothing else; what they were
computed from is there anyway. The same kernel makes the same bits again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Recipe", "can_be_made", "recipe_of"]

_NAME = "anygauge_recipe"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor is made again."""

    make: Callable[..., Tensor]
    """Keeps no tensor itself."""
    tensors: tuple[Tensor, ...]
    """Its arguments, which are kept for a backward pass anyway."""


def can_be_made(output: Tensor, make: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return the output, and let the function that is called with this very tensor know how it is made."""
    if torch.is_grad_enabled():
        setattr(output, _NAME, Recipe(make, tensors))
    return output


def recipe_of(x: Tensor) -> Recipe | None:
    """Return how a tensor is made again, if that is known."""
    return getattr(x, _NAME, None)
