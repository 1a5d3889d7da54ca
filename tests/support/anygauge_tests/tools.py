"""Tools for rollouts of several turns, to test with."""

from __future__ import annotations

import re

__all__ = ["calculator"]

_SUM = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")


def calculator(asked: str) -> str:
    """Return what two whole numbers make: ``"3 + 4"`` is ``"7"``.

    :raises ValueError: It is no sum, difference or product of two of them.
    """
    match = _SUM.fullmatch(asked)
    if match is None:
        raise ValueError(f"{asked!r} is not like 3+4")
    left, sign, right = int(match[1]), match[2], int(match[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[sign])
