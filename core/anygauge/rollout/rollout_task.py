"""Steps of a group: from a rollout to its samples, and from all samples to a scored group that passes."""

from __future__ import annotations

from collections.abc import Sequence

from anygauge.rollout.context import ProducerContext
from anygauge.rollout.function_clock import FunctionClock
from anygauge.rollout.functions import FunctionFailed, UserFunctions, apply_hooks, passes, run_function
from anygauge.rollout.groups import finished_group
from anygauge.rollout.live import LiveRollout
from anygauge.rollout.messages import place_of
from anygauge.rollout.samples import failed_sample
from anygauge.rollout.scoring import merge_rewards
from anygauge.rollout.tally import Tally
from anygauge_hooks.rl import Group, Sample

__all__ = ["make_samples", "score_and_filter"]


async def make_samples(
    functions: UserFunctions, rollout: LiveRollout, clock: FunctionClock, tally: Tally
) -> tuple[Sample, ...]:
    """Return the samples of a rollout, which every hook has seen.

    :param tally: Counts it if a function failed.
    :raises RolloutError: The engines, or too many rollouts, failed.
    """
    prompt, seed = rollout.prompt, rollout.seed
    try:
        samples = await run_function(functions.rollout, rollout, prompt, seed, clock, rollout.own_time)
        if functions.after_sample:
            samples = tuple([await apply_hooks(functions.after_sample, sample, prompt) for sample in samples])
        return samples
    except FunctionFailed as error:
        if rollout.failure is not None:
            raise rollout.failure from rollout.failure.__cause__
        tally.add_failure(place_of(prompt), str(error))
        return (failed_sample(prompt, seed, str(error)),)


async def score_and_filter(
    context: ProducerContext, rollouts: Sequence[LiveRollout], tally: Tally
) -> Group | None:
    """Return a group with its rewards, or ``None`` if a filter does not let it pass.

    :param rollouts: All done.
    :param tally: Counts what failed, and what did not pass.
    :raises RolloutError: Too many rollouts failed.
    :raises RewardError: Too many could not be scored.
    """
    group = finished_group(rollouts)
    if context.scorer is None:
        scored = merge_rewards(group, group.rollouts())
    else:
        scored = await context.scorer.score(group)
    tally.add_scored(group, scored)
    for filter_ in context.rollout_context.functions.filters:
        try:
            passed = await passes(filter_, scored)
        except FunctionFailed as error:
            for _ in rollouts:
                tally.add_failure(place_of(group.prompt), str(error))
            passed = False
        if not passed:
            tally.rejected[filter_.name] += 1
            return None
    return scored
