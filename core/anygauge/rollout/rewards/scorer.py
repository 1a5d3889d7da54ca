"""Score the groups of a step."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.rollout.rewards.call import LARGEST, Call, Item, Outcome, failure
from anygauge.rollout.rewards.messages import CallSpec, Setup
from anygauge.rollout.rewards.pool import UNTRIED, Bounds, Job, Pool
from anygauge.rollout.rewards.resolve import resolve_rewards
from anygauge.rollout.rewards.shaping import overlong_penalty, raw_number
from anygauge.rollout.tally import reasons
from anygauge_hooks.errors import RewardError
from anygauge_hooks.rl import Group, Sample

if TYPE_CHECKING:
    from anygauge.config.schema import Reward
    from anygauge.plugins import Plugins

__all__ = ["Scorer", "check_columns", "check_reward"]

logger = logging.getLogger(__name__)


def check_reward(reward: Reward, plugins: Plugins) -> None:
    """Check that every reward function of a config is there and can be called.

    :raises UnknownNameError: There is no such function.
    :raises RewardError: It cannot be called as a reward function, or none is named.
    """
    resolve_rewards(reward, plugins)


def check_columns(
    reward: Reward, plugins: Plugins, label_key: str | None, metadata: Mapping[str, Any]
) -> None:
    """Check that rows have the columns that functions in TRL's form need.

    :param metadata: Columns of a row beside its prompt and its label.
    :raises RewardError: One is missing.
    """
    item = Item([""], [None], [metadata], [""])
    for part in resolve_rewards(reward, plugins, label_key=label_key):
        try:
            part.call.arguments(item)
        except RewardError as error:
            raise RewardError(f"{part.call.name}: {error.args[0]}", hint=error.hint) from None


class Scorer(AbstractContextManager["Scorer"]):
    """The reward functions of a config, and the processes that run them.

    Functions that are registered as ``inline`` run in this process, the others in processes of their own.

    :param reward: The table of the config.
    :param max_new_tokens: Longest response, for the overlong penalty.
    :param log: Where the output of the processes goes: ``scorer.log`` stands for ``scorer-0.log`` and so on.
        ``None`` takes standard error.
    :param deadline_s: Longest time of the processes for all samples of a call; those left over then fail.
    :param label_key: Column of the label, for functions in TRL's form.
    :param is_chat: Whether the completions that those get are messages.
    :raises UnknownNameError: There is no such function.
    :raises RewardError: It cannot be called as a reward function, or none is named.
    """

    def __init__(
        self,
        reward: Reward,
        plugins: Plugins,
        *,
        max_new_tokens: int,
        log: Path | None,
        deadline_s: float | None = None,
        label_key: str | None = None,
        is_chat: bool = False,
    ) -> None:
        self._reward = reward
        self._lock = threading.Lock()
        self._max_new_tokens = max_new_tokens
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._parts = resolve_rewards(reward, plugins, label_key=label_key, is_chat=is_chat)
        apart = {part.name: (part.call, part.origin) for part in self._parts if part.origin is not None}
        self._apart = {name: index for index, name in enumerate(apart)}
        setup = Setup(
            calls=[CallSpec(origin, _fields(call)) for call, origin in apart.values()],
            memory_bytes=int(reward.memory_gib * 2**30),
            timeout_s=reward.timeout_s,
            concurrency=reward.concurrency,
        )
        calls = [call for call, _ in apart.values()]
        self._pool = Pool(calls, setup, count=reward.num_workers, log=log, pass_env=reward.pass_env)

    def start(self) -> None:
        """Start the processes, if there is work for any, without waiting for them."""
        if self._apart:
            self._pool.start()

    def cancel(self) -> None:
        """Make the call that is under way in another thread return soon; nothing more is scored."""
        self._pool.cancel()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, groups: Sequence[Group], *, tolerant: bool = False) -> list[Group]:
        """Return the groups with a reward, or the reason why there is none, on every sample.

        A sample that has a reward already keeps it.

        :param tolerant: Whether any number of samples may fail, with a warning.
        :raises RewardError: More samples than ``reward.max_failed_ratio`` could not be scored, which is found
            out without trying the rest, or a process cannot start; neither if ``tolerant``.
        """
        picked = _open_groups(groups)
        with self._lock:  # training and an evaluation may share a scorer, each in a thread of its own
            outcomes = self._score(picked, tolerant=tolerant) if picked else []
        return _put_back(groups, _samples(outcomes))

    def _score(self, groups: Sequence[Group], *, tolerant: bool) -> list[Group]:
        allowed = math.inf if tolerant else self._reward.max_failed_ratio * _count(groups)
        try:
            scored = self._scored(groups, allowed)
        except RewardError as error:  # a process cannot start
            if not tolerant:
                raise
            why = str(error.args[0])
            scored = (sample._replace(error=why) for sample in _samples(groups))
        result = [replace(group, samples=tuple(next(scored) for _ in group.samples)) for group in groups]
        self._check_failures(result, allowed)
        return result

    def _scored(self, groups: Sequence[Group], allowed: float) -> Iterator[Sample]:
        samples = _samples(groups)
        outcomes = self._outcomes(groups, allowed)
        if not self._reward.parts:
            return map(self._with_one, samples, outcomes[0])
        return map(self._with_parts, samples, zip(*outcomes, strict=True))

    def _outcomes(self, groups: Sequence[Group], allowed: float) -> list[Sequence[Outcome]]:
        """Return for each part the outcome of each sample."""
        late = f"did not return in the {self._deadline_s:g} s for all samples (run.timeout_s)"
        bounds = Bounds(most_failed=allowed, seconds=self._deadline_s, late=late)
        jobs = [
            Job(
                self._apart[part.name],
                list(_items(groups, part.call)),
                partial(_place, groups, part.call.per_group),
            )
            for part in self._parts
            if part.name in self._apart
        ]
        apart = iter(self._pool.run(jobs, bounds) if jobs else ())
        return [
            list(chain.from_iterable(next(apart)))
            if part.name in self._apart
            else [outcome for item in _items(groups, part.call) for outcome in _called(part.call, item)]
            for part in self._parts
        ]

    def _with_one(self, sample: Sample, outcome: Outcome) -> Sample:
        value, error = outcome
        if error is not None:
            return sample._replace(error=error)
        raw = value if type(value) is float else raw_number(value, self._reward)
        return sample._replace(reward=self._shaped(raw, sample), raw_reward=value)

    def _with_parts(self, sample: Sample, outcomes: Sequence[Outcome]) -> Sample:
        named = list(zip((part.name for part in self._parts), outcomes, strict=True))
        errors = {name: error for name, (_, error) in named if error is not None}
        if errors:
            own = [f"{name}: {error}" for name, error in errors.items() if error != UNTRIED]
            return sample._replace(error="; ".join(own) or UNTRIED)
        raw = {name: value for name, (value, _) in named}
        reward = self._shaped(raw_number(raw, self._reward), sample)
        if abs(reward) > LARGEST:
            return sample._replace(error=f"the weighted sum {reward:g} is too large for float32")
        return sample._replace(reward=reward, raw_reward=raw)

    def _shaped(self, raw: float, sample: Sample) -> float:
        buffer = self._reward.overlong_buffer
        if not buffer:
            return raw
        return raw - overlong_penalty(
            len(sample.response_tokens),
            limit=self._max_new_tokens,
            buffer=buffer,
            penalty=self._reward.overlong_penalty,
        )

    def _check_failures(self, groups: Sequence[Group], allowed: float) -> None:
        places: dict[str, list[str]] = {}
        for group in groups:
            for sample in group.samples:
                if sample.error is not None:
                    places.setdefault(sample.error, []).append(_name(group))
        untried = len(places.pop(UNTRIED, ()))
        if not places:  # after a cancel, some have no error of their own
            return
        failed, ratio = sum(map(len, places.values())), self._reward.max_failed_ratio
        message = f"{failed} of {_count(groups)} samples could not be scored{reasons(places)}"
        if failed > allowed:
            raise RewardError(
                message + (f"\n  and {untried} were not tried" if untried else ""),
                hint=f"Correct the data or the function, or raise reward.max_failed_ratio ({ratio:g}).",
            )
        logger.warning("%s", message)


def _samples(groups: Sequence[Group]) -> Iterator[Sample]:
    return chain.from_iterable(group.samples for group in groups)


def _open_groups(groups: Sequence[Group]) -> list[Group]:
    """Return what has no reward yet."""
    picked = (
        replace(group, samples=tuple(each for each in group.samples if each.reward is None))
        for group in groups
    )
    return [group for group in picked if group.samples]


def _put_back(groups: Sequence[Group], scored: Iterator[Sample]) -> list[Group]:
    """Return groups with what was scored; what a function has scored itself need not say from what."""
    return [
        replace(
            group,
            samples=tuple(
                next(scored)
                if each.reward is None
                else each._replace(raw_reward=each.reward if each.raw_reward is None else each.raw_reward)
                for each in group.samples
            ),
        )
        for group in groups
    ]


def _count(groups: Sequence[Group]) -> int:
    return sum(len(group.samples) for group in groups)


def _fields(call: Call) -> dict[str, object]:
    return {field.name: getattr(call, field.name) for field in fields(call) if field.name != "fn"}


def _items(groups: Sequence[Group], call: Call) -> Iterator[Item]:
    for group in groups:
        prompt, samples = group.prompt, group.samples
        if not call.per_group:
            label, metadata, text = prompt.label, prompt.metadata, prompt.text
            yield from (Item(sample.text, label, metadata, text) for sample in samples)
        elif samples:
            whole = _whole(group)
            tokens = [list(sample.response_tokens) for sample in samples] if call.trl is not None else None
            yield whole if tokens is None else whole._replace(completion_ids=tokens)


def _place(groups: Sequence[Group], per_group: bool, index: int) -> str:
    """Return the name of the prompt that an item of :func:`_items` is about."""
    counts = (bool(group.samples) if per_group else len(group.samples) for group in groups)
    names = ([_name(group)] * count for group, count in zip(groups, counts, strict=True))
    return next(islice(chain.from_iterable(names), index, None))


def _name(group: Group) -> str:
    return group.prompt.source or f"prompt {group.prompt.index}"


def _whole(group: Group) -> Item:
    prompt, count = group.prompt, len(group.samples)
    texts = [sample.text for sample in group.samples]
    return Item(texts, [prompt.label] * count, [prompt.metadata] * count, [prompt.text] * count)


def _called(call: Call, item: Item) -> list[Outcome]:
    try:
        return call.outcomes(call.fn(**call.arguments(item)), item)
    except Exception as error:  # noqa: BLE001 - foreign code: a reward; the samples get the reason
        return [call.failed(failure(error))] * call.size(item)
