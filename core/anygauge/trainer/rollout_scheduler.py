"""Rollout scheduler: the one producer of a run's groups, for the thread of the training loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

from anygauge.config import Config
from anygauge.data.media.loader import LoadedSource
from anygauge.rollout.context import ProducerContext, RolloutContext
from anygauge.rollout.producer import Continuous, Producer
from anygauge.rollout.rewards import Scorer
from anygauge.rollout.scoring import ScoringQueue
from anygauge.rollout.staleness import Staleness
from anygauge.serving.generation_client import GenerationClient
from anygauge.trainer.generation import SampleMaker, group_seeds, rollout_params
from anygauge.trainer.session import Session
from anygauge.trainer.state import TRAINING, RunState
from anygauge_hooks.data import DataSource
from anygauge_hooks.rl import Group

__all__ = ["GroupSource", "RolloutScheduler", "open_rollout_scheduler", "producer_context"]


STOP_S = 10.0
"""Longest wait for the engines to end their requests once a step has failed."""


class GroupSource(Protocol):
    """Where a step gets its groups: a producer, or the dumps of another run."""

    def collect(self, step: int) -> tuple[list[Group], float]:
        """Return the scored groups of a step, and the seconds that it waited for their scores alone."""

    def read_ahead(self, state: RunState, *, goes_on: bool) -> None:
        """Note in the state of a run what a resume needs, and draw the prompts of the next step.

        :param goes_on: Whether there is a next step.
        """

    def before_sync(self) -> None:
        """Wait for what may not go on with other weights."""

    def advance(self, version: int) -> None:
        """Learn which weights the engines serve now."""

    def stop(self) -> None:
        """Make :meth:`collect` raise ``RolloutsStopped``. Does not wait; a signal handler may call it."""

    def metrics(self) -> Mapping[str, float]:
        """Return ``rollout/*`` of the last step."""


def producer_context(
    config: Config,
    rollout_context: RolloutContext,
    source: DataSource,
    scorer: Scorer | None,
    forbidden: tuple[int, ...] = (),
) -> ProducerContext:
    """Return what a producer needs for the training samples of a run.

    :param forbidden: Tokens that are never drawn.
    """
    return ProducerContext(
        config=config.rollout,
        rollout_context=rollout_context,
        source=source,
        seeds=partial(group_seeds, config),
        params=rollout_params(config, forbidden),
        scorer=None if scorer is None else ScoringQueue(partial(scorer.score, tolerant=True), scorer.cancel),
        max_unscored_ratio=config.reward.max_failed_ratio,
    )


class RolloutScheduler:
    """A producer in an event loop; see :class:`GroupSource`.

    :param scorer: Scorer of the producer.
    :param steps: Number of steps that are left.
    """

    def __init__(
        self,
        producer: Producer,
        client: GenerationClient,
        config: Config,
        *,
        scorer: ScoringQueue | None,
        steps: int,
    ) -> None:
        self._steps = steps
        self._producer = producer
        self._scorer = None if client.overlaps else scorer
        self._events = client.loop
        self._wait = client.wait
        self._pause_engines = client.pause
        self._config = config
        rollout = config.rollout
        self._versions = 1 if rollout.schedule == "one_step_off" else rollout.max_staleness
        self._groups = rollout.prompts_per_step * (self._versions + 1)

    @property
    def rollouts(self) -> int:
        """Samples that are under way at most, while training goes on."""
        return self._groups * self._config.rollout.samples_per_prompt

    def collect(self, step: int) -> tuple[list[Group], float]:
        """Return the scored groups of the next step."""
        count, limit_s = self._config.rollout.prompts_per_step, self._config.run.timeout_s
        # A worker that does not answer is found by its own deadline, whose error says more.
        taking = self._producer.take(count, timeout_s=2 * limit_s)
        try:
            groups: list[Group] = self._wait(taking, "groups to train on")
        except Exception:  # foreign code: rewards and data; the save may need the devices of the engines
            self._events.run(self._end_requests())
            raise
        self._steps -= 1
        return groups, 0.0 if self._scorer is None else self._scorer.take_seconds()

    async def _end_requests(self) -> None:
        """End the engines' requests, unless an engine does not answer."""
        with suppress(Exception):  # the error of the step is raised
            async with asyncio.timeout(STOP_S):
                await self._producer.stop()

    def keep_going(self) -> None:
        """Let groups be generated while training goes on, as many as their age and the run's end allow."""
        rollout = self._config.rollout
        continuous = Continuous(
            groups=self._groups,
            staleness=Staleness(self._versions, rollout.prompts_per_step),
            may_start=lambda untaken: untaken < self._steps * rollout.prompts_per_step,
        )
        self._events.run(self._producer.keep_going(continuous))

    def before_sync(self) -> None:
        """Wait for what may not go on with other weights."""
        schedule = self._config.rollout.schedule
        if schedule == "one_step_off":
            self._wait(self._producer.finish_open(), "the groups of the next step")
        elif schedule == "async" and self._pause_engines is not None:
            # SGLang's own pause aborts them too, but looks only once a second whether all have ended.
            # An evaluation beside training would send its requests again at once.
            self._events.run(self._producer.shut())  # or what waits for an engine would wait again
            self._pause_engines()
            drain_s = min(self._config.weight_sync.drain_s, self._config.run.timeout_s / 2)
            self._wait(self._producer.pause(drain_s), "the engines to end their requests")

    def stop(self) -> None:
        """Let the producer stop; see :class:`GroupSource`."""
        self._events.start(self._producer.stop())

    def metrics(self) -> dict[str, float]:
        """Return ``rollout/*`` of the last step."""
        return self._producer.metrics()

    def advance(self, version: int) -> None:
        """Tell which weights the engines serve now."""
        self._events.run(self._producer.advance(version))
        if self._config.rollout.schedule == "async":
            self._events.run(self._producer.resume())

    def read_ahead(self, state: RunState, *, goes_on: bool) -> None:
        """Note in the state of a run what a resume needs, and draw the prompts of the next step."""
        saved = self._events.run(self._producer.state_dict())
        state.source = saved["source"]
        state.rollout = saved
        if goes_on and self._config.rollout.schedule == "sync":
            self._events.run(self._producer.read_ahead())


@contextmanager
def open_rollout_scheduler(
    session: Session, maker: SampleMaker, source: DataSource
) -> Iterator[RolloutScheduler]:
    """Yield what makes the samples of the training; end it after.

    :param source: Source of the training prompts, at the place that the run's state gives.
    """
    config, state, client = session.config, session.state, maker.client
    scorer = session.scorers.get(TRAINING)
    context = producer_context(config, maker.context, source, scorer, session.forbidden)
    drawn = state.info.step * config.rollout.prompts_per_step
    producer = Producer(context, version=state.version, drawn=drawn)
    if state.rollout:
        producer.load_state_dict(state.rollout)
        if isinstance(source, LoadedSource):
            source.adopt(producer.prompts())
    left = config.run.steps - state.info.step
    scheduler = RolloutScheduler(producer, client, config, scorer=context.scorer, steps=left)
    if config.rollout.schedule != "sync":
        scheduler.keep_going()
    try:
        yield scheduler
    finally:
        client.loop.run(producer.close())
