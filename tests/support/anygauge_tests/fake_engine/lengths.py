"""Named distributions of response lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

__all__ = ["Lengths", "parse_lengths"]

Lengths = Callable[[float], int]
"""From a number in [0, 1) to a length of at least one token: the inverse of the distribution function."""
_NORMAL = NormalDist()


def parse_lengths(text: str) -> Lengths:
    """Return the distribution of a name with its numbers.

    * ``fixed:N``: always N tokens.
    * ``uniform:LOW:HIGH``: each length from LOW to HIGH equally often.
    * ``exponential:MEAN``: memoryless.
    * ``lognormal:MEDIAN:SIGMA``: the shape of reasoning traces; SIGMA is that of the logarithm.
    * ``longtail:SHORT:LONG:SHARE``: LONG tokens in that share of the responses, SHORT in the others.

    :raises ValueError: There is no such distribution.
    """
    name, *numbers = text.split(":")
    try:
        return _KINDS[name](*map(float, numbers))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} names no distribution of lengths: {', '.join(_KINDS)}") from error


def _fixed(count: float) -> Lengths:
    return lambda _: max(1, int(count))


def _uniform(low: float, high: float) -> Lengths:
    return lambda at: max(1, int(low + at * (high - low + 1)))


def _exponential(mean: float) -> Lengths:
    return lambda at: max(1, round(-mean * math.log1p(-at)))


def _lognormal(median: float, sigma: float) -> Lengths:
    return lambda at: max(1, round(median * math.exp(sigma * _NORMAL.inv_cdf(min(max(at, 1e-9), 1 - 1e-9)))))


def _longtail(short: float, long: float, share: float) -> Lengths:
    return lambda at: max(1, int(long if at < share else short))


_KINDS: dict[str, Callable[..., Lengths]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "exponential": _exponential,
    "lognormal": _lognormal,
    "longtail": _longtail,
}
