"""Phrases of many messages."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "listed"]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> counted(1, "step"), counted(0, "warning")
    ('1 step', '0 warnings')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(texts: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first texts and the number of the others.

    >>> listed(["q", "k", "v"]), listed(["q", "k", "v"], 2)
    ('q, k, v', 'q, k and 1 more')
    """
    others = len(texts) - most
    return separator.join(texts[:most]) + (f" and {others} more" if others > 0 else "")
