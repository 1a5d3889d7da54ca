"""SVG paths in a box of 1000 by 1000.

The page stretches the box to the size of its chart while strokes keep their width, so that a chart fits any
screen without a script. A path of zero-length strokes with round ends is a row of dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from anygauge.observability.report.scale import Point, Range

__all__ = ["area_path", "dots_path", "line_path"]

_BOX = 1000


def line_path(points: Sequence[Point], x: Range, y: Range) -> str:
    """Return a path through points, with a gap where a value is missing and a dot for a point alone."""
    groups = (list(group) for known, group in groupby(points, lambda point: point[1] is not None) if known)
    return "".join(_stroke(group, x, y) for group in groups)


def dots_path(points: Sequence[Point], x: Range, y: Range) -> str:
    """Return a path with a dot at each point."""
    return "".join(f"M{_place(step, value, x, y)}h0" for step, value in points if value is not None)


def area_path(
    steps: Sequence[float], lower: Sequence[float], upper: Sequence[float], x: Range, y: Range
) -> str:
    """Return the outline of the area between two curves."""
    there = [_place(step, value, x, y) for step, value in zip(steps, upper, strict=True)]
    back = [_place(step, value, x, y) for step, value in zip(steps, lower, strict=True)]
    return f"M{'L'.join(there)}L{'L'.join(reversed(back))}Z"


def _stroke(points: Sequence[Point], x: Range, y: Range) -> str:
    places = [_place(step, value, x, y) for step, value in points if value is not None]
    return f"M{'L'.join(places)}{'h0' if len(places) == 1 else ''}"


def _place(step: float, value: float, x: Range, y: Range) -> str:
    # What is far outside is cut off anyway; browsers draw wrongly from about 1e7 on.
    height = min(max(1 - y.fraction(value), -9.0), 10.0)
    return f"{_BOX * x.fraction(step):.4g} {_BOX * height:.4g}"
