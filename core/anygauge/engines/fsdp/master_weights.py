"""Weights of a model that one rank holds whole: float32 masters, and the copies that the model computes with.

FSDP gathers and casts weights and reduces gradients in every micro-batch. One rank has nothing to gather, so
its model is not wrapped: it computes with copies of its dtype, which each optimizer step writes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MasterWeights", "replace_parameters"]


def replace_parameters(
    root: nn.Module, make: Callable[[nn.Parameter], Tensor | None]
) -> dict[Tensor, nn.Parameter]:
    """Replace parameters of a model; those that modules share stay shared.

    :param make: From a parameter to the values of the one in its place; ``None`` keeps it.
    :returns: The new parameters by those that they replace.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for parameter in root.parameters():
        if (values := make(parameter)) is not None:
            made[parameter] = nn.Parameter(values, parameter.requires_grad)
    for module in root.modules():
        for name, old in module._parameters.items():
            if old in made:
                module._parameters[name] = made[old]
    return made


class MasterWeights:
    """Float32 weights of a model whose parameters are copies of them.

    Parameters that have the dtype of the model are their own masters.

    :param root: The model. Its float32 parameters are replaced by copies of ``dtype``.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype) -> None:
        self._copies: dict[Tensor, nn.Parameter] = replace_parameters(
            root, lambda parameter: None if parameter.dtype == dtype else parameter.detach().to(dtype)
        )
        self._masters: dict[nn.Parameter, Any] = {copy: master for master, copy in self._copies.items()}

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the weight that an optimizer updates and a checkpoint has."""
        master: nn.Parameter = self._masters.get(parameter, parameter)
        return master

    def copy_of(self, master: Tensor) -> Tensor | None:
        """Return the copy of a weight, ``None`` if the model computes with the weight itself."""
        return self._copies.get(master)

    def copies(self) -> Iterator[Tensor]:
        """Yield all copies."""
        yield from self._masters

    @torch.no_grad()
    def write_copies(self) -> None:
        """Round the masters to the copies. Needed whenever the masters have changed."""
        if self._masters:
            torch._foreach_copy_([*self._masters], [*self._masters.values()])

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the gradients of a micro-batch to those of the masters, in float32."""
        first: list[tuple[Any, Any]] = []
        more: list[tuple[Any, Any]] = []
        for copy, master in self._masters.items():
            if copy.grad is None:
                continue
            pairs = first if master.grad is None else more
            if master.grad is None:
                master.grad = torch.empty_like(master)
            pairs.append((master.grad, copy.grad))
            copy.grad = None
        if first:
            sums, grads = zip(*first, strict=True)
            torch._foreach_copy_(sums, grads)
        if more:
            sums, grads = zip(*more, strict=True)
            torch._foreach_add_(sums, grads)
