"""From an open group to its samples, and to a scored group that the filters let pass."""

from __future__ import annotations

from typing import NamedTuple

from anygauge.rollout.control.functions import FunctionFailed, apply_hooks, passes, run_function
from anygauge.rollout.control.gate import Gate
from anygauge.rollout.control.groups import OpenGroup, whole_group
from anygauge.rollout.control.live import LiveRollout
from anygauge.rollout.control.messages import place_of
from anygauge.rollout.control.samples import failed_sample
from anygauge.rollout.control.scoring import share_rewards
from anygauge.rollout.control.tally import Tally
from anygauge.rollout.control.work import Making, Work
from anygauge_hooks.rl import Group, Sample, SamplingParams

__all__ = ["OneRollout", "judged", "make_samples"]


class OneRollout(NamedTuple):
    """A rollout of a group."""

    group: OpenGroup
    place: int
    """In the group."""
    group_name: str
    """Unique in the run."""
    params: SamplingParams
    gate: Gate

    @property
    def name(self) -> str:
        """Unique in the run."""
        return f"{self.group_name}-{self.place}"

    @property
    def seed(self) -> int:
        """Of its first generation."""
        return self.group.seeds[self.place]

    def failed(self, why: str) -> tuple[Sample, ...]:
        """Return what stands for it if its function failed."""
        return (failed_sample(self.group.prompt, self.seed, why),)


async def make_samples(making: Making, which: OneRollout) -> tuple[Sample, ...]:
    """Return the samples of a rollout, which every hook has seen.

    :raises FunctionFailed: A function of the user's did not do what it was asked for.
    :raises RolloutError: The engines failed.
    """
    prompt, functions = which.group.prompt, making.functions
    journal = which.group.journal(which.place)
    live = LiveRollout(
        which.name,
        prompt,
        which.seed,
        which.params,
        group=which.group_name,
        config=making.config,
        gate=which.gate,
        text=making.text,
        journal=journal,
        engines=making.engines,
    )
    try:
        samples = await run_function(
            functions.rollout, live, prompt, which.seed, making.config.function_timeout_s
        )
        return tuple([await apply_hooks(functions.after_sample, sample, prompt) for sample in samples])
    except FunctionFailed:
        if which.gate.failure is not None:
            raise which.gate.failure from None
        raise


async def judged(work: Work, group: OpenGroup, tally: Tally) -> Group | None:
    """Return a group with its rewards, or ``None`` if a filter does not let it pass.

    :param tally: Counts what failed, and what did not pass.
    :raises RolloutError: Too many rollouts failed.
    :raises RewardError: Too many could not be scored.
    """
    whole = whole_group(group)
    failed = {place for place, sample in enumerate(whole.samples) if sample.error is not None}
    whole = share_rewards(whole, {}) if work.scorer is None else await work.scorer.score(whole)
    tally.add_scored(whole, failed)
    for each in work.making.functions.filters:
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
