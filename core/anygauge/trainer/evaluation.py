"""Evaluation: sample every data set with the engines' current weights, score and record."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from anygauge.config import Config
from anygauge.data.balance import split_evenly
from anygauge.data.batch import select
from anygauge.data.media.loader import windows
from anygauge.observability.logs import summary
from anygauge.observability.metrics import eval_metrics
from anygauge.observability.phases import record_phase
from anygauge.rollout.rewards import Scorer, raw_number
from anygauge.runtime.worker_group import Arguments
from anygauge.trainer.generation import eval_params, eval_seeds
from anygauge.trainer.plan import conversation_batch
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.rl import Group, Prompt, SamplingParams
from anygauge_hooks.types import RunInfo

if TYPE_CHECKING:
    from anygauge.trainer.inputs import EvalSet
    from anygauge.trainer.session import Session

__all__ = ["Drawn", "eval_draw", "evaluate", "record", "sample_set", "score_metrics"]

Drawn = tuple[Sequence[Prompt], SamplingParams, Sequence[Sequence[int]]]
"""Prompts, how they are sampled, and for each the seeds of its samples."""

_log = logging.getLogger(__name__)


def evaluate(session: Session, *, tolerant: bool = False) -> dict[str, float]:
    """Return the metrics of every evaluation data set, recorded and shown.

    :param tolerant: Whether any number of samples may fail to be scored, as where an error would end a
        training that has got somewhere. What cannot be computed without them is left out.
    :raises RewardError: More than ``reward.max_failed_ratio`` do; not if ``tolerant``.
    """
    metrics: dict[str, float] = {}
    for eval_set in session.eval_sets:
        with record_phase("evaluate"):
            metrics |= _evaluate_set(session, eval_set, tolerant=tolerant)
    if metrics:
        session.reports()  # what an evaluation took is no part of a step
        session.colocation.seconds()
        record(session, session.info, metrics)
    return metrics


def record(session: Session, info: RunInfo, metrics: Mapping[str, float]) -> None:
    """Record and show the metrics of an evaluation, and tell the observers.

    :param info: The run as it stood when the evaluation began.
    """
    session.track(metrics, step=info.step)
    _log.info("evaluation after step %d: %s", info.step, summary(metrics))
    session.plugins.notify("after_evaluate", run=info, metrics=metrics)


def _evaluate_set(session: Session, eval_set: EvalSet, *, tolerant: bool) -> dict[str, float]:
    loss = _loss(session, eval_set) if session.config.run.task == "sft" else {}
    scorer = session.scorers.get(eval_set.name)
    return loss if scorer is None else {**loss, **_scored(session, eval_set, scorer, tolerant=tolerant)}


def _scored(session: Session, eval_set: EvalSet, scorer: Scorer, *, tolerant: bool) -> dict[str, float]:
    groups = sample_set(session, eval_set)
    return score_metrics(session.config, eval_set, scorer.score(groups, tolerant=tolerant))


def sample_set(session: Session, eval_set: EvalSet) -> list[Group]:
    """Return the samples of a data set, without rewards."""
    _, params, seeds = eval_draw(session, eval_set)
    assert session.maker is not None, "what is scored was generated"
    groups: list[Group] = []
    for prompts in windows(session.media, eval_set.prompts, session.config.rollout.prompts_per_step):
        groups += session.maker.sample(prompts, params, seeds[len(groups) : len(groups) + len(prompts)])
    return groups


def eval_draw(session: Session, eval_set: EvalSet) -> Drawn:
    """Return what is sampled for a data set."""
    settings = eval_set.settings
    assert settings.samples_per_prompt is not None
    seeds = eval_seeds(session.config, len(eval_set.prompts), settings.samples_per_prompt)
    return eval_set.prompts, eval_params(settings, session.forbidden), seeds


def score_metrics(config: Config, eval_set: EvalSet, groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of the scored samples of a data set."""
    raw = partial(raw_number, reward=eval_set.settings.reward or config.reward)
    return eval_metrics(eval_set.name, groups, raw, names=eval_set.part_names)


def _loss(session: Session, eval_set: EvalSet) -> dict[str, float]:
    """Return the mean negative log-likelihood of the assistant's tokens, in nats."""
    total, tokens = 0.0, 0
    for prompts in windows(session.media, eval_set.prompts, session.config.rollout.prompts_per_step):
        batch = conversation_batch(prompts)
        total += _negative_log_likelihood(session, batch)
        tokens += int(batch.loss_mask.sum())
    return {f"eval/{eval_set.name}-loss": total / tokens}


def _negative_log_likelihood(session: Session, batch: TrainBatch) -> float:
    """Return the sum over the trained tokens of samples."""
    layout, samples = session.layout, range(len(batch.lengths))
    parts = [samples[part] for part in split_evenly(len(samples), layout.data)]
    # A forward pass may be a collective, so a rank without samples of its own repeats the first.
    batches = [select(batch, part or samples[:1]) for part in parts]
    per_rank: list[Arguments] = [((batches[own],), {}) for own in layout.dp_ranks()]
    totals = session.workers.call("negative_log_likelihood", per_rank=per_rank)
    spoken = (totals[rank] for rank in layout.reporting_ranks())
    return float(sum(value for value, part in zip(spoken, parts, strict=True) if part))
