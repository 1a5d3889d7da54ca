"""Evaluation: sample every data set with the engines' current weights, score and record."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from anygauge.observability.logs import summary
from anygauge.observability.metrics import eval_metrics
from anygauge.rollout.rewards import Scorer, raw_number
from anygauge.trainer.generation import eval_params, eval_seeds
from anygauge.trainer.plan import conversation_samples, group_samples, split_evenly
from anygauge.trainer.worker_group import Arguments

if TYPE_CHECKING:
    from anygauge.trainer.inputs import EvalSet
    from anygauge.trainer.loop import Loop

__all__ = ["evaluate"]

_log = logging.getLogger(__name__)


def evaluate(loop: Loop, *, tolerant: bool = False) -> dict[str, float]:
    """Return the metrics of every evaluation data set, recorded and shown.

    :param tolerant: Whether any number of samples may fail to be scored, as where an error would end a
        training that has got somewhere. What cannot be computed without them is left out.
    :raises RewardError: More than ``reward.max_failed_ratio`` do; not if ``tolerant``.
    """
    metrics: dict[str, float] = {}
    for eval_set in loop.eval_sets:
        metrics |= _evaluate_set(loop, eval_set, tolerant=tolerant)
    if metrics:
        loop.workers.call("report")  # what an evaluation took is no part of a step
        loop.engines.reports()
        loop.track(metrics)
        _log.info("evaluation after step %d: %s", loop.info.step, summary(metrics))
        loop.plugins.notify("after_evaluate", run=loop.info, metrics=metrics)
    return metrics


def _evaluate_set(loop: Loop, eval_set: EvalSet, *, tolerant: bool) -> dict[str, float]:
    loss = _loss(loop, eval_set) if loop.config.run.task == "sft" else {}
    scorer = loop.scorers.get(eval_set.name)
    return loss if scorer is None else {**loss, **_scored(loop, eval_set, scorer, tolerant=tolerant)}


def _scored(loop: Loop, eval_set: EvalSet, scorer: Scorer, *, tolerant: bool) -> dict[str, float]:
    settings = eval_set.settings
    assert settings.samples_per_prompt is not None
    seeds = eval_seeds(loop.config, len(eval_set.prompts), settings.samples_per_prompt)
    samples = loop.engines.generate(eval_set.prompts, eval_params(settings), seeds)
    groups = scorer.score(group_samples(eval_set.prompts, samples), tolerant=tolerant)
    raw = partial(raw_number, reward=settings.reward or loop.config.reward)
    return eval_metrics(eval_set.name, groups, raw)


def _loss(loop: Loop, eval_set: EvalSet) -> dict[str, float]:
    """Return the mean negative log-likelihood of the assistant's tokens, in nats."""
    samples = conversation_samples(eval_set.prompts)
    parts = split_evenly(len(samples), loop.num_workers)
    # A forward pass may be a collective, so a rank without samples of its own repeats the first.
    shares: list[Arguments] = [((samples[part] or samples[:1],), {}) for part in parts]
    totals = loop.workers.call("negative_log_likelihood", per_rank=shares)
    total = sum(value for value, part in zip(totals, parts, strict=True) if samples[part])
    return {f"eval/{eval_set.name}-loss": total / sum(sum(sample.loss_mask) for sample in samples)}
