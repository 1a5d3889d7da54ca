"""Names of metrics, and those of a rollout.

A metric is named ``<group>/<name>`` with group ``train``, ``health``, ``rollout``, ``reward``,
``multi_turn``, ``passrate``, ``eval``, ``perf`` or ``custom``; ``docs/metrics.md`` explains each. Each group
has its own step axis, kept in the metric ``<group>/step``: a tracker draws ``train/loss`` over
``train/step``, and groups that are recorded at different times or rates do not disturb each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import fsum, sqrt
from statistics import fmean
from typing import Any

from anygauge.observability.datasets import train_datasets
from anygauge.observability.evaluation import (
    eval_metrics,
    failed_ratio,
    group_numbers,
    pass_at_k,
    pass_counts,
    pass_rates,
)
from anygauge.observability.performance import StepWork, performance_metrics
from anygauge.observability.responses import (
    length_metrics,
    repetition_ratio,
    truncated_ratio,
    turn_metrics,
)
from anygauge.observability.reward_parts import PartNames, reward_part_metrics
from anygauge_hooks.rl import Group, Prompt, Sample

__all__ = [
    "MOST_LAGS",
    "StepWork",
    "conversation_metrics",
    "eval_metrics",
    "pass_at_k",
    "pass_counts",
    "performance_metrics",
    "rollout_metrics",
    "staleness_metrics",
    "train_datasets",
    "with_step_axes",
]

MOST_LAGS = 8
"""Tokens of this lag or more are counted as one."""


def with_step_axes(metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """Return the metrics behind the ``<group>/step`` of each of their groups.

    A step that is already among the metrics is kept.
    """
    axes = dict.fromkeys((f"{name.partition('/')[0]}/step" for name in metrics), step)
    return {**axes, **metrics}


def rollout_metrics(
    groups: Sequence[Group],
    raw: Callable[[Any], float],
    *,
    datasets: int = 1,
    version: int | None = None,
    names: PartNames | None = None,
) -> dict[str, float]:
    """Return ``rollout/*``, ``reward/*``, ``multi_turn/*`` and ``passrate/*`` of the samples of a step.

    Samples that could not be scored count in ``rollout/failed_ratio`` and in what concerns responses, and are
    left out of what concerns rewards.

    :param groups: At least one.
    :param raw: From ``Sample.raw_reward`` to the number before shaping.
    :param datasets: How many data sets the run trains on; with several, those of the step have metrics too.
    :param version: Version of the weights that are about to be trained; ``None`` for samples of another run.
    :param names: Names of the parts of rewards in earlier steps, which are added to.
    """
    samples = [sample for group in groups for sample in group.samples]
    numbers = group_numbers(groups, raw)
    return {
        **_reward_metrics(groups, numbers),
        **reward_part_metrics("reward/", samples, names or PartNames()),
        "rollout/failed_ratio": failed_ratio(samples),
        "rollout/samples": len(samples),
        **_response_metrics(samples),
        **({} if version is None else staleness_metrics(samples, version)),
        **_dataset_metrics(groups, numbers, datasets),
        **turn_metrics(samples),
        **pass_rates("passrate/", numbers, pass_counts(max(map(len, numbers)))),
    }


def _reward_metrics(groups: Sequence[Group], numbers: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the statistics of rewards; nothing where no sample was scored.

    ``zero_std_ratio`` is the share of groups whose rewards are all equal: they teach nothing.
    """
    rewards = [_rewards(group) for group in groups]
    scored = list(chain.from_iterable(rewards))
    if not scored:
        return {}
    mean = fmean(scored)
    return {
        "rollout/raw_reward": fmean(chain.from_iterable(numbers)),
        "rollout/reward": mean,
        "rollout/reward_std": sqrt(fsum((reward - mean) ** 2 for reward in scored) / len(scored)),
        "rollout/zero_std_ratio": fmean(len(set(each)) <= 1 for each in rewards),
    }


def _rewards(group: Group) -> list[float]:
    rewards = [sample.reward for sample in group.samples if sample.error is None]
    assert None not in rewards, "a sample was not scored"
    return rewards  # type: ignore[return-value]  # mypy does not narrow by the assertion


def _response_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [len(sample.response_tokens) for sample in samples]
    return {
        **length_metrics("rollout/response_len", lengths),
        "rollout/truncated_ratio": truncated_ratio(samples),
        "rollout/repetition_frac": repetition_ratio(samples),
    }


def _dataset_metrics(
    groups: Sequence[Group], numbers: Sequence[Sequence[float]], datasets: int
) -> dict[str, float]:
    """Return a few metrics of each data set of the step, where the run has more than one."""
    parts: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        parts[group.prompt.dataset].append(index)
    metrics: dict[str, float] = {}
    for name, indices in parts.items() if max(datasets, len(parts)) > 1 else ():
        samples = [sample for index in indices for sample in groups[index].samples]
        scored = [number for index in indices for number in numbers[index]]
        if scored:
            metrics[f"rollout/{name}/raw_reward"] = fmean(scored)
        metrics[f"rollout/{name}/response_len/mean"] = fmean(len(each.response_tokens) for each in samples)
        metrics[f"rollout/{name}/truncated_ratio"] = truncated_ratio(samples)
    return metrics


def conversation_metrics(rows: Sequence[Prompt], *, datasets: int = 1) -> dict[str, float]:
    """Return how much a step trains on, as ``train/samples``, ``tokens`` and ``sequence_len/mean``.

    :param rows: At least one, each with a response and its loss mask.
    :param datasets: How many data sets the run trains on; with several, those of the step have the same
        metrics under ``train/<dataset>/``.
    """
    parts: dict[str, list[Prompt]] = defaultdict(list)
    for row in rows:
        parts[row.dataset].append(row)
    metrics = _row_metrics("train/", rows)
    for name, part in parts.items() if max(datasets, len(parts)) > 1 else ():
        metrics |= _row_metrics(f"train/{name}/", part)
    return metrics


def _row_metrics(prefix: str, rows: Sequence[Prompt]) -> dict[str, float]:
    return {
        f"{prefix}samples": len(rows),
        f"{prefix}tokens": sum(sum(row.loss_mask) for row in rows),
        f"{prefix}sequence_len/mean": fmean(len(row.tokens) + len(row.response) for row in rows),
    }


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
