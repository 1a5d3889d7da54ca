"""Staleness mask: leaves out tokens whose weights are too old."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from anygauge_hooks.rl import Group, Sample

__all__ = ["mask_stale"]

_log = logging.getLogger(__name__)


def mask_stale(groups: Sequence[Group], version: int, max_lag: int | None) -> list[Group]:
    """Return the groups with a loss mask of 0 where a token is older than it may be.

    Such a token is in no mean: what the loss is divided by is counted afterwards. Its sample keeps its
    reward, and takes part in its group.

    :param version: Version of the weights that are about to be trained.
    :param max_lag: In versions; ``None`` masks nothing.
    """
    if max_lag is None:
        return list(groups)
    oldest = version - max_lag
    masked = [
        replace(group, samples=tuple(_masked(sample, oldest) for sample in group.samples)) for group in groups
    ]
    if _tokens(groups) and not _tokens(masked):
        _log.warning("every token of the step is more than %d versions old: it trains nothing", max_lag)
    return masked


def _masked(sample: Sample, oldest: int) -> Sample:
    if not sample.weight_versions or min(sample.weight_versions) >= oldest:
        return sample
    own = zip(sample.loss_mask, sample.weight_versions, strict=True)
    return sample._replace(loss_mask=tuple(mask if made >= oldest else 0 for mask, made in own))


def _tokens(groups: Sequence[Group]) -> bool:
    """Return whether a token is trained on."""
    return any(any(sample.loss_mask) for group in groups for sample in group.samples)
