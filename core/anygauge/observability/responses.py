"""Response statistics: lengths, endings and number of turns.

These run on the driver for every sample of every step, so each does little for a response that is ordinary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from anygauge_hooks.rl import Sample

__all__ = ["length_metrics", "repeats", "repetition_ratio", "truncated_ratio", "turn_metrics"]

REPEATED_TOKENS = 64
"""A shorter tail is no sign of a policy that got stuck: dots, digits and table rows repeat as well."""
REPEATED_TIMES = 4
LONGEST_PERIOD = 256
"""Tokens of the longest passage whose repetition is found."""


def length_metrics(prefix: str, lengths: Sequence[int]) -> dict[str, float]:
    """Return ``<prefix>/mean``, ``median``, ``max`` and ``min``."""
    return {
        f"{prefix}/mean": fmean(lengths),
        f"{prefix}/median": float(median(lengths)),
        f"{prefix}/max": max(lengths),
        f"{prefix}/min": min(lengths),
    }


def truncated_ratio(samples: Sequence[Sample]) -> float:
    """Return the share of samples that ended because they were long enough."""
    return [sample.finish_reason for sample in samples].count("length") / len(samples)


def repetition_ratio(samples: Sequence[Sample]) -> float:
    """Return the share of samples that end in a repeated passage."""
    count = 0
    for sample in samples:
        tokens = sample.response_tokens
        count += len(tokens) >= REPEATED_TOKENS and repeats(tokens)
    return count / len(samples)


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether a response ends in the same passage four times over, 64 tokens or more in all.

    :param tokens: Tokens of a response; passages of up to 256 tokens are found.
    """
    tail = list(reversed(tokens[-REPEATED_TIMES * LONGEST_PERIOD :]))
    period = 0
    while True:
        try:
            # Only where the last token occurred before can a passage end.
            period = tail.index(tail[0], period + 1, LONGEST_PERIOD + 1)
        except (ValueError, IndexError):
            return False
        length = max(REPEATED_TIMES * period, REPEATED_TOKENS)
        if length <= len(tail) and tail[period:length] == tail[: length - period]:
            return True


def turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return ``multi_turn/*``: nothing unless the policy spoke more than once in some sample.

    A turn of the policy is a run of 1 in the loss mask; a tool or a user wrote what is between two of them.
    """
    if not any(0 in sample.loss_mask for sample in samples):
        return {}
    rounds = [_rounds(sample.loss_mask) for sample in samples]
    if max(rounds) <= 1:
        return {}
    own = [sum(sample.loss_mask) for sample in samples]
    return {
        **length_metrics("multi_turn/rounds", rounds),
        **length_metrics("multi_turn/response_len_without_observations", own),
    }


def _rounds(mask: Sequence[int]) -> int:
    return sum(after > before for before, after in pairwise((0, *mask)))
