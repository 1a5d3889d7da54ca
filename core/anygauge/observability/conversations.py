"""Metrics of the rows that an SFT step trains on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from anygauge_hooks.rl import Prompt

__all__ = ["conversation_metrics"]


def conversation_metrics(rows: Sequence[Prompt], *, datasets: int = 1) -> dict[str, float]:
    """Return how much a step trains on, as ``train/samples``, ``tokens`` and ``sequence_len/mean``.

    :param rows: At least one, each with a response and its loss mask.
    :param datasets: How many data sets the run trains on; with several, those of the step have the same
        metrics under ``train/<dataset>/``.
    """
    parts: dict[str, list[Prompt]] = defaultdict(list)
    for row in rows:
        parts[row.dataset].append(row)
    metrics = _metrics("train/", rows)
    for name, part in parts.items() if max(datasets, len(parts)) > 1 else ():
        metrics |= _metrics(f"train/{name}/", part)
    return metrics


def _metrics(prefix: str, rows: Sequence[Prompt]) -> dict[str, float]:
    return {
        f"{prefix}samples": len(rows),
        f"{prefix}tokens": sum(sum(row.loss_mask) for row in rows),
        f"{prefix}sequence_len/mean": fmean(len(row.tokens) + len(row.response) for row in rows),
    }
