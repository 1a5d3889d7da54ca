"""Names of metrics, and those of a rollout and of an evaluation.

A metric is named ``<group>/<name>`` with group ``train``, ``rollout``, ``eval`` or ``perf``. Each group has
its own step axis, kept in the metric ``<group>/step``: a tracker draws ``train/loss`` over ``train/step``,
and groups that are recorded at different times or rates do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean, pstdev

from anygauge_hooks.rl import Group

__all__ = ["eval_metrics", "rollout_metrics", "with_step_axes"]


def with_step_axes(metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """Return the metrics behind the ``<group>/step`` of each of their groups.

    A step that is already among the metrics is kept.
    """
    axes = dict.fromkeys((f"{name.partition('/')[0]}/step" for name in metrics), step)
    return {**axes, **metrics}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the ``rollout/*`` metrics of scored samples.

    ``zero_variance_ratio`` is the share of groups whose rewards are all equal: they teach nothing.

    :param groups: At least one, with every sample scored.
    """
    rewards = list(chain.from_iterable(_rewards(group) for group in groups))
    return {
        "rollout/reward_mean": fmean(rewards),
        "rollout/reward_std": pstdev(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
        "rollout/zero_variance_ratio": fmean(len(set(_rewards(group))) == 1 for group in groups),
        "rollout/samples": len(rewards),
        **_response_metrics("rollout", groups),
    }


def eval_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the ``eval/*`` metrics of scored samples.

    ``reward_best`` is the mean over prompts of the best reward of a prompt's samples: pass@k for k samples
    and a reward of 0 or 1.

    :param groups: At least one, with every sample scored.
    """
    rewards = [_rewards(group) for group in groups]
    return {
        "eval/reward_mean": fmean(map(fmean, rewards)),
        "eval/reward_best": fmean(map(max, rewards)),
        "eval/prompts": len(groups),
        **_response_metrics("eval", groups),
    }


def _rewards(group: Group) -> list[float]:
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    assert len(rewards) == len(group.samples), "a sample was not scored"
    return rewards


def _response_metrics(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.response_tokens) for sample in samples]
    return {
        f"{prefix}/response_length_mean": fmean(lengths),
        f"{prefix}/response_length_max": max(lengths),
        f"{prefix}/truncated_ratio": fmean(sample.finish_reason == "length" for sample in samples),
    }
