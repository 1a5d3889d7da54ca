"""Error texts for steps with too few groups."""

from __future__ import annotations

from collections.abc import Sequence

from anygauge.rollout.groups import generated_tokens
from anygauge.rollout.live import LiveRollout
from anygauge.rollout.tally import Tally
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rl import Prompt

__all__ = ["late", "named", "place_of", "shortage", "why_short"]

SHOWN = 5
"""Groups that a message names."""


def place_of(prompt: Prompt) -> str:
    """Return how a message names a prompt."""
    return prompt.source or f"prompt {prompt.index}"


def named(groups: Sequence[Sequence[LiveRollout]]) -> str:
    """Return the first groups, with how far their rollouts have come."""
    some = [
        f"{place_of(rollouts[0].prompt)} ({sum(bool(each.samples) for each in rollouts)} of {len(rollouts)} "
        f"rollouts done, {generated_tokens(rollouts)} tokens of the others)"
        for rollouts in groups[:SHOWN]
    ]
    more = len(groups) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")


def why_short(tally: Tally) -> str:
    """Return why there are not enough groups, as a clause."""
    if not tally.rejected:
        return "the data source has no more prompts"
    by_filter = ", ".join(f"{name} {count}" for name, count in tally.rejected.most_common())
    return f"the filters let too few groups pass; rejected by {by_filter}"


def shortage(count: int, passed: int, tally: Tally, max_num_gen_batches: int) -> RolloutError:
    """Return the error of a step that cannot have its groups."""
    return RolloutError(
        f"A step needs {count} groups, and {passed} passed: {why_short(tally)}.",
        hint="Loosen the filters, take data of another difficulty, raise rollout.max_num_gen_batches "
        f'({max_num_gen_batches}), or set rollout.on_incomplete_batch = "smaller_step".',
    )


def late(
    count: int, passed: int, groups: Sequence[Sequence[LiveRollout]], under_way: int, timeout_s: float
) -> DeadlineError:
    """Return the error of a step in which nothing happens.

    :param groups: Groups that are open.
    :param under_way: Requests that the engines have.
    """
    waits = f"open: {named(groups)}" if groups else "none is open"
    return DeadlineError(
        f"{passed} of {count} groups of a step are done, and no engine has answered for {timeout_s:g} s; "
        f"{waits}.",
        hint=f"{under_way} requests are at the engines, see their logs; raise run.timeout_s if they "
        "need longer.",
    )
