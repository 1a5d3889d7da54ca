"""Advantage estimation on each training rank: after all passes, before the first optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from anygauge.algorithms.token_advantages import token_rewards
from anygauge.algorithms.whitening import explained_variance, masked_mean, whiten
from anygauge.config.schema import Algorithm
from anygauge_hooks.algorithms import AdvantageInputs, TokenAdvantages
from anygauge_hooks.engines import TopKLogProbs
from anygauge_hooks.errors import PluginError
from anygauge_hooks.rl import TrainSample
from anygauge_hooks.types import NamedFunction

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Estimate", "Passes", "estimate"]

PerToken = Sequence["Tensor"] | Sequence[Sequence[float]]
"""Values by sample, one per response token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Log-probs and values of a rollout's samples before the first optimizer step."""

    old: PerToken
    """Log-probs that the ratio is taken against."""
    reference: Sequence[Tensor] | None = None
    teacher: Sequence[Tensor] | None = None
    top_k_log_probs: Sequence[TopKLogProbs] | None = None
    """Top-k log-probs of the teacher."""
    values: Sequence[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Samples with the advantages that they are trained on."""

    samples: Sequence[TrainSample]
    returns: Sequence[Tensor] | None = None
    """Targets of the critic, ``[R]`` for each sample."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the whole rollout, over all ranks."""


def estimate(
    algorithm: Algorithm,
    estimator: NamedFunction | None,
    samples: Sequence[TrainSample],
    passes: Passes,
    total: Callable[[Tensor], Tensor],
) -> Estimate:
    """Return the samples of this rank with their advantages. A collective where there is anything to do.

    :param estimator: ``None`` in SFT, which has no advantages.
    :param samples: Of a whole rollout; those of an estimator of groups have its advantages already.
    :param total: Sums over the data-parallel ranks.
    :raises PluginError: The estimator returned something else than what it must.
    """
    added = algorithm.distill_coef > 0
    if estimator is None or (estimator.kind == "group" and not added and not algorithm.normalize_advantages):
        return Estimate(samples)
    inputs = _inputs(algorithm, samples, passes, total)
    token_advantages = TokenAdvantages(_flat([sample.advantages for sample in samples]))
    if estimator.kind == "token":
        token_advantages = estimator.fn(inputs, **algorithm.advantage_options)
        _check(token_advantages, estimator, len(inputs.loss_mask))
    advantages = token_advantages.advantages
    if added:
        assert inputs.teacher_log_probs is not None
        advantages = advantages + algorithm.distill_coef * (inputs.teacher_log_probs - inputs.log_probs)
    if algorithm.normalize_advantages:
        advantages = whiten(advantages, inputs.loss_mask, total)
    split = torch.split(advantages, list(inputs.lengths))
    return Estimate(
        [sample._replace(advantages=own.tolist()) for sample, own in zip(samples, split, strict=True)],
        None
        if token_advantages.returns is None
        else torch.split(token_advantages.returns, list(inputs.lengths)),
        _metrics(inputs, token_advantages, passes),
    )


def _inputs(
    algorithm: Algorithm,
    samples: Sequence[TrainSample],
    passes: Passes,
    total: Callable[[Tensor], Tensor],
) -> AdvantageInputs:
    lengths = [sample.response_length for sample in samples]
    mask, old = _flat([sample.loss_mask for sample in samples]), _flat(passes.old)
    scores = torch.tensor([sample.reward for sample in samples], dtype=torch.float32)
    kl = old - _flat(passes.reference) if algorithm.kl_reward_coef and passes.reference is not None else None
    return AdvantageInputs(
        lengths=lengths,
        loss_mask=mask,
        scores=scores,
        baselines=torch.tensor([sample.baseline for sample in samples], dtype=torch.float32),
        rewards=token_rewards(scores, mask, lengths, kl_T=kl, kl_coef=algorithm.kl_reward_coef),
        log_probs=old,
        values=None if passes.values is None else _flat(passes.values),
        teacher_log_probs=None if passes.teacher is None else _flat(passes.teacher),
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


def _metrics(inputs: AdvantageInputs, estimated: TokenAdvantages, passes: Passes) -> dict[str, float]:
    mask, total = inputs.loss_mask, inputs.total
    metrics = {"advantages": masked_mean(estimated.advantages, mask, total)}
    if passes.teacher is not None:
        metrics["opd_reverse_kl"] = masked_mean(inputs.log_probs - _flat(passes.teacher), mask, total)
    if passes.reference is not None:
        metrics["reference_kl"] = masked_mean(inputs.log_probs - _flat(passes.reference), mask, total)
    if inputs.values is not None and estimated.returns is not None:
        metrics["explained_variance"] = explained_variance(inputs.values, estimated.returns, mask, total)
    return metrics


def _flat(values: PerToken) -> Tensor:
    """Return values by sample end to end, ``[T]``, float32."""
    return torch.cat([torch.as_tensor(each, dtype=torch.float32) for each in values])
