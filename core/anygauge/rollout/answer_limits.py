"""Limits on the values in an engine's answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["LARGEST_LOG_PROB", "MOST_TOKENS", "stray_token"]

MOST_TOKENS = 2**31
"""Ids of a vocabulary whose size is not known: what tokenizers and tensors of indices take."""
LARGEST_LOG_PROB = 1e-5
"""Probabilities that were normalized again in float32 exceed 1 by some 1e-7, so their logarithms exceed 0."""


def stray_token(tokens: Sequence[Any], vocab_size: int | None = None) -> int | None:
    """Return the place of the first value that is no id of a token, or ``None``.

    :param vocab_size: Size of the model's vocabulary; ``None`` if it is not known.
    """
    size = vocab_size or MOST_TOKENS
    if not tokens or (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < size):
        return None
    return next(place for place, each in enumerate(tokens) if type(each) is not int or not 0 <= each < size)
