"""Metrics of an evaluation, and pass@k, which training rollouts have too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from statistics import fmean
from typing import Any

from anygauge.observability.responses import length_metrics, repetition_ratio, truncated_ratio
from anygauge.observability.reward_parts import PartNames, reward_part_metrics
from anygauge_hooks.rl import Group, Sample

__all__ = ["eval_metrics", "failed_ratio", "group_numbers", "pass_at_k", "pass_counts", "pass_rates"]

FULL_SCORE = 1.0 - 1e-6
"""A sum of weighted rewards may miss 1 by a rounding error."""


def eval_metrics(
    name: str,
    groups: Sequence[Group],
    raw: Callable[[Any], float],
    *,
    ks: Sequence[int] | None = None,
    names: PartNames | None = None,
) -> dict[str, float]:
    """Return the ``eval/*`` and ``passrate/*`` metrics of one evaluation data set.

    ``eval/<name>`` is the mean of what the reward functions returned, before shaping, over the samples that
    could be scored.

    :param name: Name of the data set.
    :param groups: At least one.
    :param raw: From ``Sample.raw_reward`` to the number before shaping.
    :param ks: The k of each pass@k; ``None`` takes the powers of two up to the samples of a prompt, and their
        number.
    :param names: Names of the parts of rewards in earlier evaluations, which are added to.
    """
    samples = [sample for group in groups for sample in group.samples]
    numbers = group_numbers(groups, raw)
    scored = list(chain.from_iterable(numbers))
    wanted = pass_counts(max(map(len, numbers)), last=True) if ks is None else ks
    return {
        **({f"eval/{name}": fmean(scored)} if scored else {}),
        **reward_part_metrics(f"eval/{name}/reward/", samples, names or PartNames()),
        f"eval/{name}-truncated_ratio": truncated_ratio(samples),
        f"eval/{name}-failed_ratio": failed_ratio(samples),
        f"eval/{name}-samples": len(samples),
        f"eval/{name}/repetition_frac": repetition_ratio(samples),
        **length_metrics(f"eval/{name}/response_len", [len(each.response_tokens) for each in samples]),
        **pass_rates(f"passrate/{name}-", numbers, wanted),
    }


def group_numbers(groups: Sequence[Group], raw: Callable[[Any], float]) -> list[list[float]]:
    """Return the raw rewards of each group's samples, those left out that could not be scored."""
    return [[raw(each.raw_reward) for each in group.samples if each.error is None] for group in groups]


def failed_ratio(samples: Sequence[Sample]) -> float:
    """Return the share of samples that could not be scored."""
    return sum(sample.error is not None for sample in samples) / len(samples)


def pass_rates(prefix: str, numbers: Sequence[Sequence[float]], ks: Sequence[int]) -> dict[str, float]:
    """Return ``<prefix>pass@<k>``, the mean over the prompts that have k samples or more.

    :param numbers: For each prompt the raw rewards of its samples. A sample passes with a full score: 1 or
        more.
    :param ks: A k that no prompt has the samples for is left out.
    """
    counts = Counter((len(each), sum(number >= FULL_SCORE for number in each)) for each in numbers)
    rates: dict[str, float] = {}
    for k in ks:
        enough = [(n, passed, prompts) for (n, passed), prompts in counts.items() if n >= k]
        if enough:
            total = sum(prompts for *_, prompts in enough)
            rates[f"{prefix}pass@{k}"] = sum(pass_at_k(n, c, k) * prompts for n, c, prompts in enough) / total
    return rates


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Estimate the probability that one of k samples passes, without bias.

    ``1 - C(n - c, k) / C(n, k)``, https://arxiv.org/abs/2107.03374 equation 1, as a product of ratios, for
    which no n is too large.

    :param n: Samples drawn, at least k.
    :param passed: How many of them passed.
    :param k: At least 1.
    """
    if n - passed < k:
        return 1.0
    return 1.0 - prod(1.0 - k / drawn for drawn in range(n - passed + 1, n + 1))


def pass_counts(samples: int, *, last: bool = False) -> list[int]:
    """Return the powers of two up to a number of samples, and with ``last`` that number itself."""
    ks = [1 << power for power in range(samples.bit_length())]
    return sorted({*ks, samples}) if last and samples else ks
