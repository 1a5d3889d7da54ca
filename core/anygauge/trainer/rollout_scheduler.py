"""Rollout scheduler in the training loop, for steps that need more than one batch of samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from anygauge.config import Config
from anygauge.config.schema import Rollout
from anygauge.data.media.loader import LoadedSource
from anygauge.rollout.context import ProducerContext, RolloutContext
from anygauge.rollout.producer import Continuous, Producer
from anygauge.rollout.rewards import Scorer
from anygauge.rollout.scoring import GroupScorer
from anygauge.rollout.staleness import Staleness
from anygauge.serving.generation_client import GenerationClient
from anygauge.trainer.generation import group_seeds, rollout_params
from anygauge.trainer.session import TRAINING, Session
from anygauge.trainer.state import RunState
from anygauge_hooks.data import DataSource
from anygauge_hooks.rl import Group

__all__ = ["RolloutScheduler", "open_rollout_scheduler", "producer_context", "uses_rollout_scheduler"]

_log = logging.getLogger(__name__)

CONTROL = ("function", "after_sample", "filters", "over_sampling", "partial_rollout")
"""Keys of ``[rollout]`` that one call of the engines for the whole step cannot serve."""


def uses_rollout_scheduler(config: Config) -> bool:
    """Return whether a config asks for rollout control."""
    fields = Rollout.model_fields
    return any(getattr(config.rollout, key) != fields[key].default for key in CONTROL)


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
        rollout_context=rollout_context,
        source=source,
        seeds=partial(group_seeds, config),
        params=rollout_params(config, forbidden),
        scorer=None if scorer is None else GroupScorer(partial(scorer.score, tolerant=True)),
        max_unscored_ratio=config.reward.max_failed_ratio,
    )


class RolloutScheduler:
    """A producer in an event loop, for the thread of the trainer's loop."""

    def __init__(self, producer: Producer, client: GenerationClient, config: Config, *, steps: int) -> None:
        self._steps = steps
        self._producer = producer
        self._events = client.loop
        self._wait = client.wait
        self._config = config
        rollout = config.rollout
        self._versions = 1 if rollout.schedule == "one_step_off" else rollout.max_staleness
        self._groups = rollout.prompts_per_step * (self._versions + 1)

    @property
    def rollouts(self) -> int:
        """Samples that are under way at most, while training goes on."""
        return self._groups * self._config.rollout.samples_per_prompt

    def collect(self) -> list[Group]:
        """Return the scored groups of the next step."""
        count, limit_s = self._config.rollout.prompts_per_step, self._config.run.timeout_s
        # A worker that does not answer is found by its own deadline, whose error says more.
        groups: list[Group] = self._wait(
            self._producer.take(count, timeout_s=2 * limit_s), "groups to train on"
        )
        self._steps -= 1
        return groups

    def keep_going(self) -> None:
        """Let groups be generated while training goes on, as many as their age and the run's end allow."""
        rollout = self._config.rollout
        continuous = Continuous(
            groups=self._groups,
            staleness=Staleness(self._versions, rollout.prompts_per_step),
            may_start=lambda untaken: untaken < self._steps * rollout.prompts_per_step,
        )
        self._events.run(_keep_going(self._producer, continuous))

    def before_sync(self) -> None:
        """Wait for what may not go on with other weights."""
        if self._config.rollout.schedule == "one_step_off":
            self._wait(self._producer.finish_open(), "the groups of the next step")

    def metrics(self) -> dict[str, float]:
        """Return ``rollout/*`` of the last step."""
        return self._producer.metrics()

    def advance(self, version: int) -> None:
        """Tell which weights the engines serve now."""
        self._events.run(_advance(self._producer, version))

    def keep(self, state: RunState) -> None:
        """Note in the state of a run what a resume needs."""
        saved = self._events.run(self._producer.state_dict())
        state.source = saved["source"]
        state.rollout = saved


async def _advance(producer: Producer, version: int) -> None:
    producer.advance(version)


async def _keep_going(producer: Producer, continuous: Continuous) -> None:
    producer.keep_going(continuous)


@contextmanager
def open_rollout_scheduler(session: Session, source: DataSource) -> Iterator[RolloutScheduler | None]:
    """Yield what makes the samples of the training, where the config asks for control; end it after.

    :param source: Of the training prompts, where the run's state says that it stands.
    """
    config, state = session.config, session.state
    if session.maker is None or config.debug.replay_rollouts is not None:
        if state.rollout.get("open"):
            _log.warning(
                "%d prompts that were drawn before are left out: this config does without rollout control",
                len(state.rollout["open"]),
            )
        yield None
        return
    client = session.maker.client
    scorer = session.scorers.get(TRAINING)
    context = producer_context(config, session.maker.context, source, scorer, session.forbidden)
    drawn = state.info.step * config.rollout.prompts_per_step
    producer = Producer(context, version=state.version, drawn=drawn)
    if state.rollout:
        producer.load_state_dict(state.rollout)
        if isinstance(source, LoadedSource):
            source.adopt(producer.prompts())
    left = config.run.steps - state.info.step
    scheduler = RolloutScheduler(producer, client, config, steps=left)
    if config.rollout.schedule != "sync":
        scheduler.keep_going()
    try:
        yield scheduler
    finally:
        client.loop.run(producer.close())
