"""Evaluation samples, generated while training samples are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import count

from anygauge.rollout.context import RolloutContext
from anygauge.rollout.functions import FunctionFailed
from anygauge.rollout.gate import Gate
from anygauge.rollout.groups import OpenGroup
from anygauge.rollout.messages import place_of
from anygauge.rollout.rollout_task import RolloutTask, make_samples
from anygauge.rollout.tasks import first_error
from anygauge_hooks.rl import Prompt, Sample, SamplingParams

__all__ = ["sample_all"]

_log = logging.getLogger(__name__)
_calls = count(1)


async def sample_all(
    context: RolloutContext,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    seeds: Sequence[Sequence[int]],
    *,
    at_once: int | None = None,
) -> list[list[Sample]]:
    """Return one sample per seed for each prompt, in order.

    Of a rollout that became several samples, the last is returned; one that failed has an error.

    :param at_once: Rollouts that are under way at most; ``None`` for all.
    :raises RolloutError: The engines failed.
    """
    gate, call = Gate(context.generator, context.vocab_size), next(_calls)
    gate.open()
    slots = asyncio.Semaphore(at_once or max(1, sum(map(len, seeds))))

    async def run(group: OpenGroup, rollout: int) -> Sample:
        async with slots:
            task = RolloutTask(group, rollout, f"eval{call}-{group.number}", params, gate)
            try:
                return (await make_samples(context, task))[-1]
            except FunctionFailed as error:
                _log.warning("a rollout of %s failed: %s", place_of(group.prompt), error)
                return task.failed(str(error))[-1]

    groups = [OpenGroup(number, *own) for number, own in enumerate(zip(prompts, seeds, strict=True))]
    async with first_error(), asyncio.TaskGroup() as tasks:
        made = [[tasks.create_task(run(group, n)) for n in range(len(group.seeds))] for group in groups]
    return [[task.result() for task in own] for own in made]
