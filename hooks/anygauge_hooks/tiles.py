"""Part of a kernel: the passes of ``linear_logprob`` over a tile of logits.

The core goes over hidden states and weights tile by tile, makes the products and adds up what comes of them.
What is left is elementwise, which takes one pass in a kernel of its own and five in operators of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["KeepsLogits", "Kept", "Slopes", "Sums", "Tile", "TileMath"]


@dataclass(frozen=True, slots=True)
class Kept:
    """Logits of a tile for backward.

    For hidden states of 16 bits they are differences ``z = (logit - peak) * scale`` in float16. Those are
    precise for likely tokens: a probability has a relative error of at most ``2**-11 |z|``. The logit itself
    in bfloat16 would give one of ``2**-9 |logit|``.
    """

    peaks: Tensor
    """``[t, b]``, of the dtype of the tile's logits: the peak of each part of a row, at least the largest
    logit of the part and at most that of the row. Rows are contiguous."""
    logits: Tensor
    """``[t, v]`` with the strides of the tile's logits, or ``[t, 0]`` where they are computed again: float16
    differences, or the logits as they are, in their own dtype."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Some tokens by some rows of the weight."""

    tokens: slice
    rows: slice
    first: int
    """The id in the whole vocabulary of the first row."""
    targets: Tensor
    """``[t, N]``, int64, contiguous: ids in the whole vocabulary, of which some are in the tile."""
    logits: Tensor
    """``[t, v]``, float32 at least; each row is contiguous. ``[t, 0]`` for passes in place that derive from
    what is kept."""
    spare: Tensor | None
    """Other memory of the same shape and dtype, or ``None`` for passes that work in place."""
    dtype: torch.dtype
    """Dtype of the hidden states."""
    scale: float
    """One over the temperature."""
    kept: Kept | None = None
    """For passes that are :class:`KeepsLogits`; ``None`` for others."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Running sums over tiles for each token, with ``z = (logit - peak) * scale``. Contiguous."""

    peak: Tensor
    """``[t]``: the largest logit, -1e30 before the first tile."""
    total: Tensor
    """``[t]``: sum of ``exp z``."""
    mean: Tensor
    """``[t]``: sum of ``z exp z``."""
    chosen: Tensor
    """``[t, N]``: the logit of each target that was there, else 0."""


@dataclass(frozen=True, slots=True)
class Slopes:
    """Factors of the derivatives by the logits of a token. Contiguous."""

    base: Tensor
    """``[t]``: the logit whose probability is 1."""
    entropy: Tensor
    """``[t]``"""
    total: Tensor
    """``[t]``"""
    slope: Tensor | None
    """``[t]``, or ``None`` for 0."""
    chosen: Tensor
    """``[t, N]``: the derivative by the logit of each target; equal targets have equal ones."""


class TileMath(Protocol):
    """The passes over a tile. A kernel does each in one."""

    @property
    def in_place(self) -> bool:
        """Whether a tile needs no spare memory and ``summarize`` leaves the logits as they are."""

    def summarize(self, tile: Tile, sums: Sums) -> None:
        """Bring the sums up to date; may overwrite the tile, unless ``in_place``."""

    def derive(self, tile: Tile, slopes: Slopes) -> Tensor:
        """Return the derivative by each logit, rounded once.

        It is ``chosen`` for a target, else ``-exp(l) (total + slope (l + entropy))`` for
        ``l = (logit - base) * scale``.

        :returns: ``[t, v]``, in the dtype of the hidden states, in memory of the tile; rows are contiguous.
        """


@runtime_checkable
class KeepsLogits(TileMath, Protocol):
    """Passes that can keep logits from forward to backward, which then makes no product for them again.

    ``summarize`` writes ``kept.peaks``, and ``kept.logits`` unless they are ``[t, 0]``. ``derive`` reads
    ``kept.logits``, or rounds the differences of the tile's logits alike: the gradient has the same bits. So
    have the sums, whatever is kept: compile one kernel for both. Differences below -1e4 may be that.
    """

    def peaks(self, width: int) -> int:
        """Return into how many parts a row of a tile is divided, each with a peak."""
