"""Numbers with their nouns."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> counted(1, "step"), counted(0, "warning")
    ('1 step', '0 warnings')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
