"""Asynchronous scoring: each group is scored as soon as it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Group, Sample

__all__ = ["GroupScorer", "merge_rewards"]

Score = Callable[[Sequence[Group]], Sequence[Group]]


class GroupScorer:
    """Scores groups in a thread of its own; groups that arrive while it is busy form its next call.

    Each rollout is scored once, by its last sample, whose reward all samples of the rollout get. One that has
    a reward already, or an error, is left as it is.

    :param score: Returns the groups with a reward, or the reason why there is none, on every sample.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
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
        picked = _to_score(group)
        if not picked:
            return merge_rewards(group, {})
        answer: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        reduced = Group(prompt=group.prompt, samples=tuple(group.samples[place] for place in picked))
        self._waiting.append((reduced, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        scored = await answer
        return merge_rewards(group, dict(zip(picked, scored.samples, strict=True)))

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
        """Wait for the call that is under way, and take no further one."""
        self._waiting.clear()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._thread.shutdown(wait=False)


def _to_score(group: Group) -> list[int]:
    """Return the places of the samples that are scored: the last one of each rollout."""
    last = {_rollout(place, sample): place for place, sample in enumerate(group.samples)}
    return [place for place in last.values() if _is_open(group.samples[place])]


def _is_open(sample: Sample) -> bool:
    return sample.reward is None and sample.error is None


def _rollout(place: int, sample: Sample) -> tuple[str, int]:
    return ("alone", place) if sample.rollout is None else ("of", sample.rollout)


def merge_rewards(group: Group, scored: dict[int, Sample]) -> Group:
    """Return a group in which all samples of a rollout have the reward, or the error, of its last one.

    :param scored: By place.
    :raises RolloutError: A function gave the samples of one rollout different rewards.
    """
    verdicts: dict[tuple[str, int], Sample] = {}
    for place, sample in enumerate(group.samples):
        verdicts[_rollout(place, sample)] = scored.get(place, sample)
    samples = []
    for place, sample in enumerate(group.samples):
        verdict = verdicts[_rollout(place, sample)]
        if sample.reward is not None and sample.reward != verdict.reward:
            raise RolloutError(
                f"The samples of a rollout of {group.prompt.source or group.prompt.index} have the rewards "
                f"{sample.reward:g} and {verdict.reward}.",
                hint="A rollout has one reward: give it to its last sample.",
            )
        # What a function has scored itself need not say what it was scored from.
        raw = verdict.reward if verdict.raw_reward is None else verdict.raw_reward
        samples.append(sample._replace(reward=verdict.reward, raw_reward=raw, error=verdict.error))
    return replace(group, samples=tuple(samples))
