"""Elementwise recompute: outputs of norms, activations and rotations are computed again in the backward pass.

Only the linear layer or the attention that follows keeps such an output, and what it was computed from is
kept anyway. The same kernel gives the same bits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["kept_as_inputs", "recomputable"]

_NAME = "anygauge_recipe"


class _Recipe:
    """Tensors that one call computes, and how."""

    def __init__(self, compute: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
        self._compute = compute
        self._inputs = inputs
        self._outputs: tuple[Tensor, ...] = ()
        self.uses = 0
        """How often a backward pass will still take one."""

    @torch.no_grad()
    def take(self, index: int) -> Tensor:
        """Return an output. All are computed for the first one, and freed with the last."""
        if not self._outputs:
            outputs = self._compute(*self._inputs)
            self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        output = self._outputs[index]
        self.uses -= 1
        if not self.uses:
            self._outputs = ()
        return output


def recomputable(compute: Callable[..., Any], *inputs: Tensor) -> Any:
    """Return a tensor or a tuple of them, and let :func:`kept_as_inputs` know how they are computed.

    :param compute: Keeps no tensor but ``inputs``.
    """
    outputs = compute(*inputs)
    if torch.is_grad_enabled():
        recipe = _Recipe(compute, inputs)
        for index, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
            setattr(output, _NAME, (recipe, index))
    return outputs


@contextmanager
def kept_as_inputs(*tensors: Tensor) -> Iterator[None]:
    """Keep none of these tensors for a backward pass, where they can be computed again."""
    recipes = {each.data_ptr(): (each, getattr(each, _NAME, None)) for each in tensors}
    if all(recipe is None for _, recipe in recipes.values()):
        yield
        return

    def pack(tensor: Tensor) -> Any:
        whole, recipe = recipes.get(tensor.data_ptr(), (tensor, None))
        if recipe is None or tensor.numel() != whole.numel() or not tensor.is_contiguous():
            return tensor
        recipe[0].uses += 1
        return recipe, tensor.shape

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        (recipe, index), shape = packed
        output: Tensor = recipe.take(index)
        return output.view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
