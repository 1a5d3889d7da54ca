"""Group producer: samples groups from per-request generators, for one step or continuously.

All of it runs in one event loop. A group *waits* from the moment its prompt was drawn, is *open* once its
rollouts have started, *done* once its samples are scored and every filter let it pass, and *taken* when
:meth:`Producer.take` has returned it. It is known by how many prompts were drawn before it in the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anygauge.failures import on_failure
from anygauge.rollout.context import ProducerContext
from anygauge.rollout.function_clock import FunctionClock
from anygauge.rollout.gate import Gate
from anygauge.rollout.groups import (
    generated_tokens,
    group_state,
    is_begun,
    restored_group,
    restored_rollouts,
    rollouts_state,
)
from anygauge.rollout.live import LiveRollout
from anygauge.rollout.messages import late, named, shortage, why_short
from anygauge.rollout.rollout_task import make_samples, score_and_filter
from anygauge.rollout.staleness import Owed, Staleness, choose, is_met
from anygauge.rollout.tally import Tally
from anygauge_hooks.data import DataSource
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.rl import Group, Prompt
from anygauge_hooks.rollout import SESSION

__all__ = ["Continuous", "Producer", "RolloutsStopped"]

_log = logging.getLogger(__name__)


class RolloutsStopped(Exception):
    """The run was asked to stop while it waited for groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuous:
    """How groups are kept under way while training goes on."""

    groups: int
    """Most groups that are open at once."""
    staleness: Staleness | None = None
    """``None`` for any age."""
    may_start: Callable[[int], bool] | None = None
    """Asked before a group starts, with the number of groups that are open, or done and not taken."""
    max_done: int | None = None
    """Groups that are done and not taken; at as many none is started. ``None`` takes ``groups``."""


Rollouts = Sequence[LiveRollout]
"""The rollouts of a group that waits or is open."""


def draw(source: DataSource, count: int) -> Sequence[Prompt]:
    """Return the next prompts of a source, whose position stays as it was if that fails."""
    with on_failure(partial(source.load_state_dict, source.state_dict())):
        return source.next(count)


class Producer:
    """Keeps groups under way and hands out those that are done.

    As it is made, it works for one step at a time: :meth:`take` starts what a step needs, and stops what is
    left over. After :meth:`keep_going` it works all the time, and :meth:`take` only takes.

    Its methods are called in one event loop; :meth:`metrics` and :meth:`load_state_dict` from anywhere.

    :param version: Version of the weights that the engines serve.
    :param drawn: Prompts that the run has drawn before.
    """

    def __init__(self, context: ProducerContext, *, version: int = 0, drawn: int = 0) -> None:
        self._context = context
        rollouts = context.rollout_context
        self._gate = Gate(rollouts.generator, rollouts.vocab_size, most=context.max_requests)
        self._clock = FunctionClock(rollouts.config.function_timeout_s)
        self._continuous: Continuous | None = None
        self._goal = 0
        self._version = self._next_version = version
        self._drawn = drawn
        self._exhausted = False
        self._waiting: dict[int, Rollouts] = {}
        self._open: dict[int, Rollouts] = {}
        self._done: dict[int, Group] = {}
        self._started_at: dict[int, int] = {}  # the version that was served; no token of the group is older
        self._failure: BaseException | None = None
        self._is_stopping = False
        self._is_stopped = False
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._tally = Tally(*self._bounds(context.config.prompts_per_step))
        self._metrics: dict[str, float] = {}

    # -------------------------------------------------------------------------
    # What the trainer calls
    # -------------------------------------------------------------------------

    async def take(self, count: int, *, timeout_s: float | None = None) -> list[Group]:
        """Return the groups of a step, as soon as there are enough.

        In steps they come in the order in which their prompts were drawn; continuously, in that in which they
        were done, but for those that would be too old in a later step: these are waited for.

        :param timeout_s: Longest wait without any answer of an engine, rounded up to a multiple of it.
        :returns: ``count`` groups; fewer, and at least one, where the filters leave no more and
            ``rollout.on_incomplete_batch`` is ``"smaller_step"``.
        :raises RolloutError: The engines or too many rollouts failed, or the filters leave too few groups.
        :raises RewardError: Too many rollouts could not be scored.
        :raises DeadlineError: There were not enough in time.
        :raises RolloutsStopped: :meth:`stop` was called; the engines have no request.
        """
        self._begin(count)
        while not self._is_enough(count):
            self._changed.clear()
            await self._wait(count, timeout_s)
        taken = self._pick(count)
        if self._continuous is None:
            await self._stop_unfinished()
        self._end(count, taken)
        return taken

    async def read_ahead(self) -> None:
        """Draw the prompts that the next step starts with, while others train.

        :meth:`state_dict` is asked for before, so that a resumed run draws them again.
        """
        config = self._context.config
        known = len(self._waiting) + len(self._open) + len(self._done)
        if (missing := config.prompts_per_step + config.over_sampling - known) > 0:
            try:
                await self._read(missing)
            except Exception as error:  # noqa: BLE001 - foreign code: a data source; who takes gets the error
                self._fail(error)

    async def keep_going(self, continuous: Continuous) -> None:
        """Keep groups under way from now on, also between two calls of :meth:`take`."""
        self._continuous = continuous
        self._gate.open()
        self._start_pump()
        self._notify()

    async def advance(self, version: int) -> None:
        """Learn that the engines serve a version now, and that the step before is over."""
        self._version = self._next_version = version
        self._notify()

    async def finish_open(self) -> None:
        """Return once every group that may start is done, so that no engine has anything left to do.

        After :meth:`stop` nothing is waited for. What failed is raised by :meth:`take`; the rest is ended.
        """
        while not (self._failure or self._is_stopped) and (self._open or self._missing() > 0):
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            await self._gate.close()

    async def shut(self) -> None:
        """Let no request through; what the engines have goes on."""
        self._gate.shut()

    async def pause(self, drain_s: float = 0.0) -> None:
        """Pause every rollout, and return once the engines have no request.

        What they were generating is kept and goes on at :meth:`resume`, with whatever weights serve then.

        :param drain_s: Longest wait for requests to end by themselves, in seconds.
        """
        await self._gate.close(drain_s)

    async def resume(self) -> None:
        """Let rollouts go on."""
        if self._continuous is not None:
            self._gate.open()
        self._notify()

    async def stop(self) -> None:
        """End the engines' requests for good, and let :meth:`take` raise."""
        self._is_stopping = True  # a step whose last requests end meanwhile is not begun any more
        await self._gate.close(for_good=True)
        self._is_stopped = True
        self._notify()

    async def state_dict(self) -> dict[str, Any]:
        """Return all that an exact resume needs: ``source`` is the data source's state.

        It shares tokens with the groups, which replace theirs and change none, so it costs little in a step
        after which nothing is saved. What an engine is generating at that moment is not part of it, unless
        :meth:`pause` has ended it.
        """
        async with self._reading:
            groups = [*(self._open[number] for number in sorted(self._open)), *self._waiting.values()]
            started_at = self._started_at
            return {
                "source": self._context.source.state_dict(),
                "drawn": self._drawn,
                "open": [rollouts_state(own, started_at.get(own[0].number, 0)) for own in groups],
                "done": [
                    group_state(number, started_at[number], group) for number, group in self._done.items()
                ],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another producer of the same config stood; the data source goes with it.

        Called before the first :meth:`take`.

        :raises CheckpointError: It is not what :meth:`state_dict` returns.
        """
        try:
            source, self._drawn = state["source"], int(state["drawn"])
            self._waiting = {
                entry["number"]: restored_rollouts(entry, self._context, self._gate)
                for entry in state["open"]
            }
            self._done = {entry["number"]: restored_group(entry) for entry in state["done"]}
            self._started_at = {
                entry["number"]: entry["started_at"] for entry in (*state["open"], *state["done"])
            }
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The checkpoint's state of the rollouts cannot be read: {error!r}.",
                hint="Resume from another checkpoint.",
            ) from error
        self._context.source.load_state_dict(source)

    def prompts(self) -> list[Prompt]:
        """Return the prompts of the groups that wait or are done."""
        waiting = [rollouts[0].prompt for rollouts in self._waiting.values()]
        return waiting + [group.prompt for group in self._done.values()]

    def metrics(self) -> dict[str, float]:
        """Return ``rollout/*`` of what was done for the last groups that were taken."""
        return dict(self._metrics)

    async def close(self) -> None:
        """End all that is under way."""
        self._gate.shut()
        await self._cancel_rollouts()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        if self._context.scorer is not None:
            await self._context.scorer.close()

    # -------------------------------------------------------------------------
    # A step
    # -------------------------------------------------------------------------

    def _begin(self, count: int) -> None:
        self._goal = count
        self._tally.most_failed, self._tally.most_unscored = self._bounds(count)
        if self._continuous is None:
            under_way = [*self._open.values(), *self._waiting.values()]
            self._tally.continued = sum(map(generated_tokens, under_way))
            self._gate.open()
        self._start_pump()
        self._notify()

    async def _wait(self, count: int, timeout_s: float | None) -> None:
        """Return once a group is done, or no more will be.

        :raises DeadlineError: No engine has answered for so long.
        """
        answered = self._gate.answered
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            if self._gate.answered == answered:
                groups = [self._open[number] for number in sorted(self._open)]
                under_way = self._gate.under_way
                raise late(count, len(self._done), groups, under_way, timeout_s or 0.0) from None

    def _is_enough(self, count: int) -> bool:
        if self._failure is not None:
            raise self._failure
        if self._is_stopped:
            raise RolloutsStopped
        if self._is_stopping:
            return False
        if len(self._done) >= count and is_met(self._owed(), list(map(self._age, self._done))):
            return True
        if self._open or not self._has_given_up():
            return False
        if self._context.config.on_incomplete_batch == "error" or not self._done:
            raise shortage(count, len(self._done), self._tally, self._context.config.max_num_gen_batches)
        return True

    def _pick(self, count: int) -> list[Group]:
        numbers = choose(list(self._done), count, self._owed(), self._age)
        taken = {number: self._done.pop(number) for number in numbers}
        for number in numbers:
            del self._started_at[number]
        return [taken[number] for number in (numbers if self._continuous else sorted(numbers))]

    def _owed(self) -> list[Owed]:
        bound = None if self._continuous is None else self._continuous.staleness
        if bound is None:
            return []
        begun = [number for number, own in self._waiting.items() if is_begun(own)]  # before a resume
        return bound.owed(map(self._age, [*self._open, *begun, *self._done]), self._next_version)

    def _age(self, number: int) -> int:
        return self._started_at[number]

    async def _stop_unfinished(self) -> None:
        """Keep what is not taken for the next step, or discard it."""
        self._goal = 0
        self._tally.discarded = len(self._open) + len(self._done)
        if self._context.config.partial_rollout:
            await self._gate.close()
            return
        self._gate.shut()
        await self._cancel_rollouts()
        prompts = {number: rollouts[0].prompt for number, rollouts in self._open.items()}
        prompts |= {number: group.prompt for number, group in self._done.items()}
        unfinished = {number: self._rollouts(number, prompts[number]) for number in sorted(prompts)}
        for number in unfinished:
            del self._started_at[number]
        self._open.clear()
        self._done.clear()
        if self._context.config.requeue_discarded:
            self._waiting = unfinished | self._waiting
        elif unfinished:
            self._tally.dropped = len(unfinished)
            groups = list(unfinished.values())
            _log.info("%d prompts whose groups were not done are dropped: %s", len(groups), named(groups))

    def _end(self, count: int, taken: Sequence[Group]) -> None:
        if len(taken) < count:
            _log.warning("a step has %d groups instead of %d: %s", len(taken), count, why_short(self._tally))
        self._metrics = self._tally.metrics(len(taken))
        self._tally.reset()
        self._next_version = self._version + 1
        self._notify()

    # -------------------------------------------------------------------------
    # Groups
    # -------------------------------------------------------------------------

    def _start_pump(self) -> None:
        if self._pump is None:
            self._pump = asyncio.create_task(self._keep_started(), name="rollout control")

    async def _keep_started(self) -> None:
        """Start groups whenever some are wanted."""
        try:
            while True:
                while (wanted := self._missing()) > 0:
                    if self._waiting:
                        self._start(next(iter(self._waiting)))
                    else:
                        await self._read(wanted)
                self._wanted.clear()
                await self._wanted.wait()
        except Exception as error:  # noqa: BLE001 - foreign code: a data source; who takes gets the error
            self._fail(error)

    def _missing(self) -> int:
        """Return how many groups may be started now."""
        if self._failure is not None or self._has_given_up() or not self._gate.is_open:
            return 0
        if self._continuous is None:
            wanted = self._goal + self._context.config.over_sampling if self._goal else 0
            return wanted - len(self._open) - len(self._done)
        return self._room(self._continuous)

    def _room(self, continuous: Continuous) -> int:
        untaken = len(self._open) + len(self._done)
        if len(self._done) >= max(continuous.max_done or continuous.groups, self._goal):
            return 0
        bound = continuous.staleness
        if bound is not None and not bound.may_start(untaken, self._version, self._next_version):
            return 0
        if continuous.may_start is not None and not continuous.may_start(untaken):
            return 0
        return continuous.groups - len(self._open)

    def _has_given_up(self) -> bool:
        """Return whether no more groups are started for the step."""
        config, rejected = self._context.config, self._tally.rejected.total()
        needed = self._goal or config.prompts_per_step
        return rejected >= needed * config.max_num_gen_batches or (self._exhausted and not self._waiting)

    async def _read(self, count: int) -> None:
        async with self._reading:
            prompts = await asyncio.to_thread(draw, self._context.source, count)
            for prompt in prompts:
                self._waiting[self._drawn] = self._rollouts(self._drawn, prompt)
                self._drawn += 1
        self._exhausted = not prompts
        self._notify()

    def _rollouts(self, number: int, prompt: Prompt) -> Rollouts:
        """Return the rollouts of a group at their beginning."""
        seeds = self._context.seeds(number)
        return [
            LiveRollout(self._context, self._gate, prompt, number, place, seed)
            for place, seed in enumerate(seeds)
        ]

    def _start(self, number: int) -> None:
        """Start the rollouts of a group that waits; the last one to end settles it."""
        rollouts = self._open[number] = self._waiting.pop(number)
        if not is_begun(rollouts):
            self._started_at[number] = self._version
        unfinished = [rollout for rollout in rollouts if not rollout.samples]
        loop = asyncio.get_running_loop()
        for rollout in unfinished or rollouts[-1:]:
            rollout.own_time.task = loop.create_task(self._run(rollout))

    async def _run(self, rollout: LiveRollout) -> None:
        rollouts, functions = self._open[rollout.number], self._context.rollout_context.functions
        SESSION.set(rollout.session)
        try:
            if not rollout.samples:
                rollout.samples = await make_samples(functions, rollout, self._clock, self._tally)
            if all([each.samples for each in rollouts]):
                await self._settle(rollouts)
        except Exception as error:  # noqa: BLE001 - foreign code: functions of the user; who takes gets the error
            self._fail(error)

    async def _settle(self, rollouts: Rollouts) -> None:
        """Score a group and ask the filters."""
        number = rollouts[0].number
        group = await score_and_filter(self._context, rollouts, self._tally)
        del self._open[number]
        if group is None:
            del self._started_at[number]
        else:
            self._done[number] = group
        self._notify()

    async def _cancel_rollouts(self) -> None:
        """Cancel what runs for open groups, and return once it has cleaned up."""
        times = [rollout.own_time for rollouts in self._open.values() for rollout in rollouts]
        tasks = [own.task for own in times if own.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._wanted.set()

    # -------------------------------------------------------------------------
    # Counts
    # -------------------------------------------------------------------------

    def _bounds(self, count: int) -> tuple[float, float]:
        rollouts = count * self._context.config.samples_per_prompt
        return rollouts * self._context.config.max_failed_ratio, rollouts * self._context.max_unscored_ratio
