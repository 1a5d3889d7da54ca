"""Rollout task: from an open group to its samples, and to a scored group that passes the filters."""

from __future__ import annotations

from typing import NamedTuple

from anygauge.rollout.context import ProducerContext, RolloutContext
from anygauge.rollout.function_clock import FunctionClock
from anygauge.rollout.functions import FunctionFailed, apply_hooks, passes, run_function
from anygauge.rollout.gate import Gate
from anygauge.rollout.groups import OpenGroup, whole_group
from anygauge.rollout.live import LiveRollout
from anygauge.rollout.messages import place_of
from anygauge.rollout.samples import failed_sample
from anygauge.rollout.scoring import merge_rewards
from anygauge.rollout.tally import Tally
from anygauge_hooks.rl import Group, Sample, SamplingParams

__all__ = ["RolloutTask", "make_samples", "score_and_filter"]


class RolloutTask(NamedTuple):
    """A rollout of a group."""

    group: OpenGroup
    place: int
    """In the group."""
    group_name: str
    """Unique in the run."""
    params: SamplingParams
    gate: Gate
    clock: FunctionClock
    """Limits the time of rollout functions."""

    @property
    def name(self) -> str:
        """Unique in the run."""
        return f"{self.group_name}-{self.place}"

    @property
    def seed(self) -> int:
        """Seed of the first generation."""
        return self.group.seeds[self.place]

    def failed(self, why: str) -> tuple[Sample, ...]:
        """Return what stands for it if its function failed."""
        return (failed_sample(self.group.prompt, self.seed, why),)


async def make_samples(context: RolloutContext, task: RolloutTask) -> tuple[Sample, ...]:
    """Return the samples of a rollout, which every hook has seen.

    :raises FunctionFailed: A function of the user's did not do what it was asked for.
    :raises RolloutError: The engines failed.
    """
    prompt, functions = task.group.prompt, context.functions
    journal = task.group.journal(task.place)
    live = LiveRollout(
        task.name,
        prompt,
        task.seed,
        task.params,
        group=task.group_name,
        order=(task.group.number, task.place),
        config=context.config,
        gate=task.gate,
        text=context.text,
        journal=journal,
        engines=context.engines,
    )
    try:
        samples = await run_function(functions.rollout, live, prompt, task.seed, task.clock)
        if not functions.after_sample:
            return samples
        return tuple([await apply_hooks(functions.after_sample, sample, prompt) for sample in samples])
    except FunctionFailed:
        if task.gate.failure is not None:
            raise task.gate.failure from None
        raise


async def score_and_filter(context: ProducerContext, group: OpenGroup, tally: Tally) -> Group | None:
    """Return a group with its rewards, or ``None`` if a filter does not let it pass.

    :param tally: Counts what failed, and what did not pass.
    :raises RolloutError: Too many rollouts failed.
    :raises RewardError: Too many could not be scored.
    """
    whole = whole_group(group)
    failed = {place for place, sample in enumerate(whole.samples) if sample.error is not None}
    whole = merge_rewards(whole, {}) if context.scorer is None else await context.scorer.score(whole)
    tally.add_scored(whole, failed)
    for each in context.rollout_context.functions.filters:
        try:
            passed = await passes(each, whole)
        except FunctionFailed as error:
            for _ in group.seeds:
                tally.add_failure(place_of(group.prompt), str(error))
            passed = False
        if not passed:
            tally.rejected[each.name] += 1
            return None
    return whole
