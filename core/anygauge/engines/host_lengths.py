"""Lengths of packed sequences as host integers, kept with the tensor of their boundaries.

Attention of transformers' models is given the boundaries alone, and would read them from the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["lengths_of", "set_lengths", "take_lengths"]


def set_lengths(boundaries: Tensor, lengths: Sequence[int]) -> None:
    """Keep the lengths of packed sequences.

    :param boundaries: ``[N + 1]``: where each sequence begins, and the last one ends.
    """
    boundaries.host_lengths = tuple(lengths)  # type: ignore[attr-defined]  # ours


def lengths_of(boundaries: Any) -> Sequence[int] | None:
    """Return the lengths that were kept with boundaries, if any were."""
    return getattr(boundaries, "host_lengths", None)


def take_lengths(inputs: dict[str, Any]) -> Sequence[int] | None:
    """Take the attention lengths out of a tower's inputs, and keep them with their boundaries.

    :param inputs: Keyword arguments, from ``TowerSpec.inputs``.
    :returns: The lengths, if all layers attend within the same sequences.
    """
    lengths = inputs.pop("lengths", None)
    is_by_name = isinstance(lengths, Mapping)
    by_name: Mapping[str, Any] = lengths if is_by_name else {"cu_seqlens": lengths}
    for name, each in by_name.items():
        if each is not None and name in inputs:
            set_lengths(inputs[name], each)
    return None if is_by_name else lengths
