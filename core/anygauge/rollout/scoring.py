"""Asynchronous scoring: each group is scored as soon as it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Group, Sample

__all__ = ["ScoringQueue", "merge_rewards"]

Score = Callable[[Sequence[Group]], Sequence[Group]]


class ScoringQueue:
    """Scores groups in a thread of its own; groups that arrive while it is busy form its next call.

    Each rollout is scored once, by its last sample, whose reward all samples of the rollout get. One that has
    a reward already, or an error, is left as it is.

    :param score: Returns the groups with a reward, or the reason why there is none, on every sample.
    :param cancel: Makes a call that is under way return soon.
    """

    def __init__(self, score: Score, cancel: Callable[[], object] = lambda: None) -> None:
        self._score = score
        self._cancel = cancel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._waiting: list[tuple[Group, asyncio.Future[Group]]] = []
        self._task: asyncio.Task[None] | None = None
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return and reset the seconds that scoring took."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def score(self, group: Group) -> Group:
        """Return a group with its rewards.

        :raises RewardError: The processes that score cannot start.
        """
        rollouts = group.rollouts()
        unscored = tuple([rollout[-1] for rollout in rollouts if _is_unscored(rollout[-1])])
        if not unscored:
            return merge_rewards(group, rollouts)
        answer: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        self._waiting.append((Group(prompt=group.prompt, samples=unscored), answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        return merge_rewards(group, rollouts, (await answer).samples)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(0)  # those that are whole in the same moment go together
            batch, self._waiting = self._waiting, []
            started = loop.time()
            try:
                scored = await loop.run_in_executor(self._thread, self._score, [group for group, _ in batch])
            except Exception as error:  # noqa: BLE001 - foreign code: rewards; who asked gets the error
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            finally:
                self._seconds += loop.time() - started
            for (_, answer), group in zip(batch, scored, strict=True):
                if not answer.done():
                    answer.set_result(group)

    async def close(self) -> None:
        """Cancel the call that is under way, and take no further one."""
        self._waiting.clear()
        self._cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._thread.shutdown(wait=False)


def _is_unscored(sample: Sample) -> bool:
    return sample.reward is None and sample.error is None


def merge_rewards(group: Group, rollouts: Sequence[Sequence[Sample]], scored: Sequence[Sample] = ()) -> Group:
    """Return a group in which all samples of a rollout have the reward, or the error, of its last one.

    :param scored: The last sample of each rollout that had neither, in order; empty where nothing is scored.
    :raises RolloutError: A function gave the samples of one rollout different rewards.
    """
    answers, samples = iter(scored), list[Sample]()
    for rollout in rollouts:
        end = next(answers) if scored and _is_unscored(rollout[-1]) else rollout[-1]
        if end.raw_reward is None:  # what a function has scored itself need not say what it was scored from
            end = end._replace(raw_reward=end.reward)
        for sample in rollout[:-1]:
            if sample.reward is not None and sample.reward != end.reward:
                raise RolloutError(
                    f"The samples of a rollout of {group.prompt.source or group.prompt.index} have the "
                    f"rewards {sample.reward:g} and {end.reward}.",
                    hint="A rollout has one reward: give it to its last sample.",
                )
            samples.append(sample._replace(reward=end.reward, raw_reward=end.raw_reward, error=end.error))
        samples.append(end)
    return replace(group, samples=tuple(samples))
