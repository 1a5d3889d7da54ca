"""Group producer: samples groups from per-request generators, for one step or continuously.

All of it runs in one event loop. A group is *open* from the moment its prompt was drawn, *done* once its
samples are scored and every filter let it pass, and *taken* when :meth:`Producer.take` has returned it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.rollout.context import ProducerContext
from anygauge.rollout.function_clock import FunctionClock
from anygauge.rollout.functions import FunctionFailed
from anygauge.rollout.gate import Gate
from anygauge.rollout.groups import DoneGroup, OpenGroup, as_json
from anygauge.rollout.messages import late, named, place_of, shortage, why_short
from anygauge.rollout.rollout_task import RolloutTask, make_samples, score_and_filter
from anygauge.rollout.staleness import Owed, Staleness, choose, is_met
from anygauge.rollout.tally import Tally
from anygauge.rollout.tasks import cancel, first_error
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.rl import Group, Prompt

__all__ = ["Continuous", "Producer"]

_log = logging.getLogger(__name__)


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


class Producer:
    """Keeps groups under way and hands out those that are done.

    As it is made, it works for one step at a time: :meth:`take` starts what a step needs, and stops what is
    left over. After :meth:`keep_going` it works all the time, and :meth:`take` only takes.

    Its methods are called in one event loop; :meth:`metrics` and :meth:`load_state_dict` from anywhere.

    :param version: Of the weights that the engines serve.
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
        self._waiting: deque[OpenGroup] = deque()
        self._open: dict[int, tuple[OpenGroup, asyncio.Task[None]]] = {}
        self._done: list[DoneGroup] = []
        self._failure: BaseException | None = None
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
        """
        self._begin(count)
        while not self._is_enough(count):
            self._changed.clear()
            await self._wait(count, timeout_s)
        taken = self._pick(count)
        if self._continuous is None:
            await self._stop_unfinished()
        self._end(count, taken)
        return [done.group for done in taken]

    async def read_ahead(self) -> None:
        """Draw the prompts that the next step starts with, while others train.

        :meth:`state_dict` is asked for before, so that a resumed run draws them again.
        """
        config = self._context.config
        known = len(self._waiting) + len(self._open) + len(self._done)
        if (missing := config.prompts_per_step + config.over_sampling - known) > 0:
            await self._read(missing)

    def keep_going(self, continuous: Continuous) -> None:
        """Keep groups under way from now on, also between two calls of :meth:`take`."""
        self._continuous = continuous
        self._gate.open()
        self._start_pump()
        self._notify()

    def advance(self, version: int) -> None:
        """Learn that the engines serve a version now, and that the step before is over."""
        self._version = self._next_version = version
        self._notify()

    async def finish_open(self) -> None:
        """Return once every group that may start is done, so that no engine has anything left to do.

        :raises RolloutError: The engines or too many rollouts failed.
        :raises RewardError: Too many rollouts could not be scored.
        """
        while self._failure is None and (self._open or self._missing() > 0):
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def pause(self) -> None:
        """Pause every rollout, and return once the engines have no request.

        What they were generating is kept and goes on at :meth:`resume`, with whatever weights serve then.
        """
        await self._gate.close()

    def resume(self) -> None:
        """Let rollouts go on."""
        if self._continuous is not None:
            self._gate.open()
        self._notify()

    async def state_dict(self) -> dict[str, Any]:
        """Return all that an exact resume needs, as JSON can write it: ``source`` is the data source's state.

        What an engine is generating at that moment is not part of it, unless :meth:`pause` has ended it.
        """
        async with self._reading:
            groups = [group for _, (group, _) in sorted(self._open.items())]
            state = {
                "source": self._context.source.state_dict(),
                "drawn": self._drawn,
                "open": [group.state() for group in [*groups, *self._waiting]],
                "done": [done.state() for done in self._done],
            }
        encoded: dict[str, Any] = as_json(state)
        return encoded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another producer of the same config stood; the data source goes with it.

        Called before the first :meth:`take`.

        :raises CheckpointError: It is not what :meth:`state_dict` returns.
        """
        seeds = self._context.seeds
        try:
            source, self._drawn = state["source"], int(state["drawn"])
            self._waiting = deque(OpenGroup.restored(entry, seeds) for entry in state["open"])
            self._done = [DoneGroup.restored(entry, seeds) for entry in state["done"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The checkpoint's state of the rollouts cannot be read: {error!r}.",
                hint="Resume from another checkpoint.",
            ) from error
        self._context.source.load_state_dict(source)

    def prompts(self) -> list[Prompt]:
        """Return the prompts of the groups that wait or are done."""
        return [*(group.prompt for group in self._waiting), *(done.group.prompt for done in self._done)]

    def metrics(self) -> dict[str, float]:
        """Return ``rollout/*`` of what was done for the last groups that were taken."""
        return dict(self._metrics)

    async def close(self) -> None:
        """End all that is under way."""
        self._gate.shut()
        tasks = [task for _, task in self._open.values()]
        if self._pump is not None:
            tasks.append(self._pump)
        await cancel(tasks)
        if self._context.scorer is not None:
            await self._context.scorer.close()

    # -------------------------------------------------------------------------
    # A step
    # -------------------------------------------------------------------------

    def _begin(self, count: int) -> None:
        self._goal = count
        self._tally.most_failed, self._tally.most_unscored = self._bounds(count)
        if self._continuous is None:
            self._tally.continued = sum(group.length for group, _ in self._open.values())
            self._tally.continued += sum(group.length for group in self._waiting)
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
                groups = [group for _, (group, _) in sorted(self._open.items())]
                under_way = self._gate.under_way
                raise late(count, len(self._done), groups, under_way, timeout_s or 0.0) from None

    def _is_enough(self, count: int) -> bool:
        if self._failure is not None:
            raise self._failure
        if len(self._done) >= count and is_met(self._owed(), [done.started_at for done in self._done]):
            return True
        if self._open or not self._has_given_up():
            return False
        if self._context.config.on_incomplete_batch == "error" or not self._done:
            raise shortage(count, len(self._done), self._tally, self._context.config.max_num_gen_batches)
        return True

    def _pick(self, count: int) -> list[DoneGroup]:
        taken = choose(self._done, count, self._owed(), lambda done: done.started_at)
        numbers = {done.number for done in taken}
        self._done = [done for done in self._done if done.number not in numbers]
        return taken if self._continuous else sorted(taken, key=lambda done: done.number)

    def _owed(self) -> list[Owed]:
        bound = None if self._continuous is None else self._continuous.staleness
        if bound is None:
            return []
        ages = [group.started_at for group, _ in self._open.values()]
        ages += [group.started_at for group in self._waiting if group.is_begun]  # of before a resume
        return bound.owed([*ages, *(done.started_at for done in self._done)], self._next_version)

    async def _stop_unfinished(self) -> None:
        """Keep what is not taken for the next step, or discard it."""
        self._goal = 0
        self._tally.discarded = len(self._open) + len(self._done)
        if self._context.config.partial_rollout:
            await self._gate.close()
            return
        self._gate.shut()
        running = list(self._open.values())
        await cancel([task for _, task in running])
        self._open.clear()
        groups = [group for group, task in running if task.cancelled()]
        groups += [OpenGroup(done.number, done.group.prompt, done.seeds) for done in self._done]
        self._done.clear()
        for group in groups:
            group.forget()
        if self._context.config.requeue_discarded:
            self._waiting.extendleft(sorted(groups, key=lambda group: -group.number))
        elif groups:
            self._tally.dropped = len(groups)
            _log.info("%d prompts whose groups were not done are dropped: %s", len(groups), named(groups))

    def _end(self, count: int, taken: Sequence[DoneGroup]) -> None:
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
                    if not self._waiting:
                        await self._read(wanted)
                    if self._waiting and self._missing() > 0:
                        self._start(self._waiting.popleft())
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
        config, rejected = self._context.config, self._tally.rejected_groups()
        needed = self._goal or config.prompts_per_step
        return rejected >= needed * config.max_num_gen_batches or (self._exhausted and not self._waiting)

    async def _read(self, count: int) -> None:
        async with self._reading:
            prompts = await asyncio.to_thread(self._context.source.next, count)
            for prompt in prompts:
                seeds = self._context.seeds(self._drawn)
                self._waiting.append(OpenGroup(number=self._drawn, prompt=prompt, seeds=seeds))
                self._drawn += 1
        self._exhausted = not prompts
        self._notify()

    def _start(self, group: OpenGroup) -> None:
        if not group.is_begun:
            group.started_at = self._version
        task = asyncio.create_task(self._run_group(group), name=f"group {group.number}")
        self._open[group.number] = (group, task)

    async def _run_group(self, group: OpenGroup) -> None:
        try:
            async with first_error(), asyncio.TaskGroup() as tasks:
                for rollout in range(len(group.seeds)):
                    if rollout not in group.samples:
                        tasks.create_task(self._run_rollout(group, rollout))
            await self._settle(group)
        except Exception as error:  # noqa: BLE001 - foreign code: functions of the user; who takes gets the error
            self._fail(error)
        finally:
            self._open.pop(group.number, None)
            self._notify()

    async def _run_rollout(self, group: OpenGroup, rollout: int) -> None:
        name = f"{self._context.name}{group.number}"
        task = RolloutTask(group, rollout, name, self._context.params, self._gate, self._clock)
        try:
            group.samples[rollout] = await make_samples(self._context.rollout_context, task)
        except FunctionFailed as error:
            self._tally.add_failure(place_of(group.prompt), str(error))
            group.samples[rollout] = task.failed(str(error))
        group.journals.pop(rollout, None)

    async def _settle(self, group: OpenGroup) -> None:
        """Score a group and ask the filters."""
        scored = await score_and_filter(self._context, group, self._tally)
        if scored is not None:
            self._done.append(DoneGroup(group.number, group.started_at, scored, group.seeds))

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
