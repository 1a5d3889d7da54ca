"""Evaluation samples, generated while training samples are."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from anygauge.rollout.context import ProducerContext, RolloutContext
from anygauge.rollout.messages import place_of
from anygauge.rollout.producer import Producer
from anygauge_hooks.rl import Group, Prompt, SamplingParams

__all__ = ["sample_groups"]

_log = logging.getLogger(__name__)
_calls = count(1)


async def sample_groups(
    context: RolloutContext,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    seeds: Sequence[Sequence[int]],
    *,
    at_once: int | None = None,
) -> list[Group]:
    """Return the group of each prompt, in order, with one sample for each seed and no reward.

    Of a rollout that became several samples, the last is in the group; one that failed has an error. Filters
    are not asked.

    :param at_once: Requests that the engines have at once, at most; ``None`` for any number.
    :raises RolloutError: The engines failed.
    """
    if not prompts:
        return []
    wanted = {
        "prompts_per_step": len(prompts),
        "samples_per_prompt": max(1, *map(len, seeds)),
        "max_failed_ratio": 1.0,
        "over_sampling": 0,
    }
    producer = Producer(
        ProducerContext(
            config=context.config.model_copy(update=wanted),
            rollout_context=replace(context, functions=context.functions._replace(filters=())),
            source=_PromptList(prompts),
            seeds=seeds.__getitem__,
            params=params,
            name=f"eval{next(_calls)}-",
            max_requests=at_once,
        )
    )
    try:
        return [_ends(group) for group in await producer.take(len(prompts))]
    finally:
        await producer.close()


def _ends(group: Group) -> Group:
    """Return a group with the last sample of each rollout."""
    for sample in group.samples:
        if sample.error is not None:
            _log.warning("a rollout of %s failed: %s", place_of(group.prompt), sample.error)
    return replace(group, samples=tuple(rollout[-1]._replace(rollout=None) for rollout in group.rollouts()))


class _PromptList:
    """A data source of prompts that are drawn once."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._drawn = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def next(self, num_prompts: int) -> Sequence[Prompt]:
        drawn = self._prompts[self._drawn : self._drawn + num_prompts]
        self._drawn += len(drawn)
        return drawn

    def all(self, limit: int | None = None) -> Sequence[Prompt]:
        return self._prompts[:limit]

    def state_dict(self) -> Mapping[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]
