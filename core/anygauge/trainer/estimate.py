"""Advantage estimation on each training rank: after all passes, before the first optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anygauge.algorithms.scan import sample_of_token
from anygauge.algorithms.token_advantages import token_rewards
from anygauge.algorithms.whitening import explained_variance, masked_mean, whiten
from anygauge.config.schema import Algorithm
from anygauge_hooks.algorithms import AdvantageInputs, TokenAdvantages
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.errors import PluginError
from anygauge_hooks.types import NamedFunction

__all__ = ["estimate", "group_advantages"]


def estimate(
    algorithm: Algorithm,
    estimator: NamedFunction | None,
    batch: TrainBatch,
    total: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Fill in the advantages of a batch, and the returns of an estimator that has any.

    A collective where there is more to do than to compare the rewards of groups.

    :param estimator: ``None`` in SFT, which has no advantages.
    :param batch: After all passes. One that was dumped has its group advantages already.
    :param total: Sums over the data-parallel ranks.
    :returns: Metrics of the whole rollout, over all ranks.
    :raises PluginError: The estimator returned something else than what it must.
    """
    if batch.group_advantages is None:
        advantages_N, batch.baselines = _of_groups(algorithm, estimator, batch)
        batch.group_advantages = advantages_N[sample_of_token(batch.response_lengths)]
    batch.advantages = batch.group_advantages
    added = algorithm.distill_coef > 0
    if estimator is None or (estimator.kind == "group" and not added and not algorithm.normalize_advantages):
        return {}
    inputs = _inputs(algorithm, batch, total)
    estimated = TokenAdvantages(batch.group_advantages)
    if estimator.kind == "token":
        estimated = estimator.fn(inputs, **algorithm.advantage_options)
        _check(estimated, estimator, len(inputs.loss_mask))
    batch.advantages, batch.returns = estimated
    if added:
        assert inputs.teacher_log_probs is not None
        assert inputs.log_probs is not None
        teacher = algorithm.distill_coef * (inputs.teacher_log_probs - inputs.log_probs)
        batch.advantages = batch.advantages + teacher
    if algorithm.normalize_advantages:
        batch.advantages = whiten(batch.advantages, inputs.loss_mask, total)
    return _metrics(inputs, estimated, batch)


def _of_groups(
    algorithm: Algorithm, estimator: NamedFunction | None, batch: TrainBatch
) -> tuple[Tensor, Tensor]:
    """Return advantage and baseline of each sample, ``[N]``: those of its rollout, and 0 without a reward."""
    if not batch.group_rewards:
        return torch.zeros(len(batch.lengths)), torch.zeros(len(batch.lengths))
    advantages = group_advantages(algorithm, estimator, batch.group_rewards)
    baselines: list[float] = []
    for rewards in batch.group_rewards:
        scored = [reward for reward in rewards if reward is not None]
        mean = fmean(scored) if scored else 0.0
        baselines += [0.0 if reward is None else mean for reward in rewards]
    of_rollouts = torch.tensor([advantages, baselines])[:, torch.tensor(batch.rollouts)]
    return of_rollouts[0], of_rollouts[1]


def group_advantages(
    algorithm: Algorithm, estimator: NamedFunction | None, group_rewards: Sequence[Sequence[float | None]]
) -> list[float]:
    """Return the advantage of each rollout within its group, end to end; 0 without a reward.

    Equal groups ask the estimator once.

    :param estimator: All advantages are 0 unless it is one of groups.
    """
    known: dict[tuple[float, ...], Sequence[float]] = {}
    advantages: list[float] = []
    for rewards in group_rewards:
        scored = tuple(reward for reward in rewards if reward is not None)
        if scored not in known:
            known[scored] = _scored_advantages(algorithm, estimator, scored)
        own = iter(known[scored])
        advantages += [0.0 if reward is None else next(own) for reward in rewards]
    return advantages


def _scored_advantages(
    algorithm: Algorithm, estimator: NamedFunction | None, rewards: Sequence[float]
) -> Sequence[float]:
    if not rewards or estimator is None or estimator.kind != "group":
        return [0.0] * len(rewards)
    result: Any = estimator.fn(torch.tensor(rewards, dtype=torch.float32), **algorithm.advantage_options)
    if not isinstance(result, Tensor) or result.shape != (len(rewards),):
        shape = f" {list(result.shape)}" if isinstance(result, Tensor) else ""
        raise PluginError(
            f"An advantage estimator must return one advantage for each of {len(rewards)} rewards; "
            f"this one returned a {type(result).__name__}{shape}.",
            hint="Return a tensor [G], or register the estimator with kind = 'token'.",
        )
    advantages: list[float] = result.tolist()
    return advantages


def _inputs(algorithm: Algorithm, batch: TrainBatch, total: Callable[[Tensor], Tensor]) -> AdvantageInputs:
    lengths, mask, old, reference = (
        batch.response_lengths,
        batch.loss_mask.float(),
        batch.old_log_probs,
        batch.reference_log_probs,
    )
    assert batch.baselines is not None, "they are estimated with the group advantages"
    kl = None
    if algorithm.kl_reward_coef:
        assert old is not None
        assert reference is not None
        kl = old - reference
    return AdvantageInputs(
        lengths=lengths,
        loss_mask=mask,
        scores=batch.rewards,
        baselines=batch.baselines,
        rewards=token_rewards(batch.rewards, mask, lengths, kl_T=kl, kl_coef=algorithm.kl_reward_coef),
        log_probs=old,
        values=batch.values,
        teacher_log_probs=batch.teacher_log_probs,
        total=total,
    )


def _check(result: Any, estimator: NamedFunction, tokens: int) -> None:
    """Raise if an estimator of tokens returned something else than a number for each."""
    problem = None if isinstance(result, TokenAdvantages) else f"it returned a {type(result).__name__}"
    if problem is None:
        wanted = {"advantages": result.advantages}
        if result.returns is not None or "values" in estimator.needs:
            wanted["returns"] = result.returns
        for name, value in wanted.items():
            if not isinstance(value, torch.Tensor):
                problem = f"its {name} are a {type(value).__name__}"
            elif value.shape != (tokens,):
                problem = f"its {name} are {list(value.shape)}"
    if problem is not None:
        raise PluginError(
            f"Advantage estimator {estimator.name!r} must return TokenAdvantages with tensors [{tokens}], "
            f"and returns too if it needs values; {problem}.",
            hint="One number for each response token, end to end in the order of the samples.",
        )


def _metrics(inputs: AdvantageInputs, estimated: TokenAdvantages, batch: TrainBatch) -> dict[str, float]:
    mask, total = inputs.loss_mask, inputs.total
    metrics = {"advantages": masked_mean(estimated.advantages, mask, total)}
    others = {"opd_reverse_kl": batch.teacher_log_probs, "reference_kl": batch.reference_log_probs}
    for name, log_probs in others.items():
        if log_probs is not None and inputs.log_probs is not None:
            metrics[name] = masked_mean(inputs.log_probs - log_probs, mask, total)
    if inputs.values is not None and estimated.returns is not None:
        metrics["explained_variance"] = explained_variance(inputs.values, estimated.returns, mask, total)
    return metrics
