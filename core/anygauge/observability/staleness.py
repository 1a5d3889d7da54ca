"""Staleness metrics: age of the weights that sampled the tokens of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from anygauge_hooks.rl import Sample

__all__ = ["MOST_LAGS", "staleness_metrics"]

MOST_LAGS = 8
"""Tokens of this lag or more are counted as one."""


def staleness_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Return ``rollout/lag/*`` and ``rollout/mixed_ratio``, of the tokens that the policy sampled.

    The lag of a token is the number of weight updates between the weights that made it and those that are
    trained on it.

    :param version: Version of the weights that are about to be trained.
    :returns: Nothing where the policy sampled no token.
    """
    per_sample = [_versions(sample) for sample in samples]
    lags: Counter[int] = Counter()
    for versions in per_sample:
        for made, count in versions.items():
            lags[version - made] += count
    total = lags.total()
    if not total:
        return {}
    shares: Counter[int] = Counter()
    for lag, count in lags.items():
        shares[min(lag, MOST_LAGS)] += count
    return {
        "rollout/lag/mean": sum(lag * count for lag, count in lags.items()) / total,
        "rollout/lag/max": max(lags),
        **{f"rollout/lag/share_{lag}": shares[lag] / total for lag in sorted(shares)},
        "rollout/mixed_ratio": sum(len(versions) > 1 for versions in per_sample) / len(samples),
    }


def _versions(sample: Sample) -> Mapping[int, int]:
    """Return how many tokens each version made; fast where it is one, as in most samples of most runs."""
    versions, mask = sample.weight_versions, sample.loss_mask
    if versions and versions.count(versions[0]) == len(versions):
        return {versions[0]: own} if (own := sum(mask)) else {}
    return Counter(made for made, counts in zip(versions, mask, strict=True) if counts)
