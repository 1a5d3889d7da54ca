"""Optional abilities of an optimizer from ``make_optimizer``, beyond ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FusedOptimizer"]


@runtime_checkable
class FusedOptimizer(Protocol):
    """An optimizer whose step scales gradients and writes the model's copies of the weights.

    The engine scales and copies itself for an optimizer without these members. All arguments are given by
    parameter group, for each weight of a group. A gradient is flat and float32, a copy flat and bfloat16, or
    ``None``. A class may inherit from this one, and then has the defaults below.
    """

    takes_remainders: bool = False
    """Whether weights that have a copy may be int16 tensors.

    The engine then turns each of them into int16 (``weight.data = ...``), and a step finds the float32 weight
    in both: its bits are ``(bits of the copy << 16) + weight``. It writes both again. The copy is the new
    weight rounded to nearest, ties away from zero, which leaves what int16 can hold; for a NaN it is a NaN.
    State and results are those of float32 weights, to the bit."""

    def step_from(
        self,
        gradients: Sequence[Sequence[Tensor]],
        scale: float,
        copies: Sequence[Sequence[Tensor | None]],
    ) -> None:
        """Take a step with ``scale`` times these gradients, and write each new weight to its copy, rounded.

        Gradients of the weights themselves (``weight.grad``) are not read, and ``gradients`` are not changed.
        """

    def prepare(
        self, gradients: Sequence[Sequence[Tensor]], copies: Sequence[Sequence[Tensor | None]]
    ) -> None:
        """Do the host's part of a step, without reading the gradients: the device still computes them.

        Called before each step, with the arguments of the step. The step may be left out after it.
        """
