"""Plain-text tables, which survive a pipe and a bug report."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["columns"]


def columns(rows: Sequence[Sequence[str]], indent: int = 2) -> str:
    """Return rows with their cells aligned; the last column is not padded.

    >>> print(columns([("op", "source"), ("rms_norm", "torch")], indent=0))
    op        source
    rms_norm  torch
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{' ' * indent}{line}".rstrip() for line in lines)
