"""From values to places on a chart: ranges, ticks, numbers as text, thinning and smoothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = [
    "Point",
    "Range",
    "format_number",
    "nice_ticks",
    "smooth",
    "thin",
    "tick_labels",
    "value_range",
]

Point = tuple[int, float | None]
"""A step and its value."""

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_SAME = 1e-9
"""Relative difference below which values are one."""
_TINY = 1e-290
_MANY = 50
"""Number of points above which a few outliers do not set the range."""
_FAR = 6.0
"""Spread of all points over that of the inner 98 %, above which the others are outliers."""


@dataclass(frozen=True, slots=True)
class Range:
    """A closed interval that is not empty."""

    low: float
    high: float

    def fraction(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


def value_range(values: Sequence[float], floor: float | None = None, ceiling: float | None = None) -> Range:
    """Return the range that a chart shows: all values, or without far outliers, with some room.

    :param values: At least one.
    :param floor: Limit that no value should be below: the range starts there if it comes near it.
    :param ceiling: Limit that no value should be above.
    """
    low, high = _inner(sorted(values))
    room = _room(low, high)
    wide = Range(low - room, high + room)
    if floor is not None and low >= floor and (wide.low < floor or low - floor < 0.4 * (high - floor)):
        wide = Range(floor, wide.high)
    if ceiling is not None and high <= ceiling < wide.high:
        wide = Range(wide.low, ceiling + 0.02 * (ceiling - wide.low))
    return wide


def _room(low: float, high: float) -> float:
    """Return how much a range is widened: a share of it, or of the value where there is but one."""
    size = max(abs(low), abs(high))
    if high - low > _SAME * size and high - low > _TINY:
        return 0.06 * (high - low)
    return 0.1 * size if size > _TINY else 1.0


def _inner(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of sorted values, or of the inner 98 % where the others lie far outside."""
    low, high = values[0], values[-1]
    if len(values) < _MANY:
        return low, high
    cut = len(values) // 100 + 1
    inner_low, inner_high = values[cut], values[-cut - 1]
    spread = inner_high - inner_low
    if spread == 0 or high - low <= _FAR * spread:
        return low, high
    return max(low, inner_low - spread / 2), min(high, inner_high + spread / 2)


def nice_ticks(shown: Range, most: int) -> list[float]:
    """Return round numbers inside a range, equally far apart.

    >>> nice_ticks(Range(0.0, 1.0), 6)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]

    :param most: Largest number of ticks, at least 2.
    """
    least = (shown.high - shown.low) / most
    magnitude = 10.0 ** math.floor(math.log10(least))
    step = next(step * magnitude for step in _STEPS if step * magnitude >= least * (1 - 1e-9))
    first = math.ceil(shown.low / step - 1e-9)
    last = math.floor(shown.high / step + 1e-9)
    return [_rounded(index * step) for index in range(first, last + 1)]


def _rounded(value: float) -> float:
    return float(f"{value:.12g}") + 0.0


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return ticks as text, all with the same number of decimals.

    >>> tick_labels([0.0, 0.5, 1.0])
    ['0', '0.5', '1.0']
    """
    largest = max(map(abs, ticks), default=0.0)
    if largest >= 10_000 or 0 < largest < 1e-3:
        return [format_number(tick) for tick in ticks]
    decimals = max((len(f"{tick:.10g}".partition(".")[2]) for tick in ticks), default=0)
    return ["0" if tick == 0 else _signed(f"{tick:,.{decimals}f}") for tick in ticks]


def format_number(value: float, digits: int = 3) -> str:
    """Return a number as a reader wants it.

    >>> [format_number(value) for value in (0.12345, 1234.5, 12345.6, 2.5e7)]
    ['0.123', '1,234', '12.3k', '25M']
    """
    size = abs(value)
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        shown = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return _signed(f"{shown}e") + _signed(str(int(exponent)))
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor:
            scaled = value / (1e3 if suffix == "k" else factor)
            return _signed(f"{scaled:.{digits}g}" if abs(scaled) < 1000 else f"{scaled:,.0f}") + suffix
    if size >= 1000:
        return _signed(f"{value:,.0f}")
    return _signed(f"{value:.{digits}g}")


def _signed(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most ``most`` points that look the same: the least and the greatest of each stretch.

    :param most: At least 4.
    """
    if len(points) <= most:
        return list(points)
    width = len(points) / ((most - 2) // 2)
    kept = {0, len(points) - 1}
    for bucket in range((most - 2) // 2):
        span = range(int(bucket * width), int((bucket + 1) * width))
        numbers = [index for index in span if points[index][1] is not None] or [span[0]]
        kept |= {
            min(numbers, key=lambda i: points[i][1] or 0.0),
            max(numbers, key=lambda i: points[i][1] or 0.0),
        }
    return [points[index] for index in sorted(kept)]


def smooth(points: Sequence[Point], window: int, most: int) -> list[Point]:
    """Return evenly spaced points, each the mean of the numbers in the whole window around it.

    There is none within half a window of either end: a narrower window would follow the noise of a few points
    there, and one that is not centered would lag.

    :param window: Number of points, odd and at most all of them.
    :param most: Points to return at most.
    """
    sums = [0.0, *accumulate(value or 0.0 for _, value in points)]
    counts = [0, *accumulate(value is not None for _, value in points)]
    first, last = window // 2, len(points) - 1 - window // 2
    stride = -(-(last + 1 - first) // most)
    smoothed: list[Point] = []
    for index in range(first + (last - first) % stride, last + 1, stride):
        start, end = index - window // 2, index + window // 2 + 1
        count = counts[end] - counts[start]
        smoothed.append((points[index][0], (sums[end] - sums[start]) / count if count else None))
    return smoothed
