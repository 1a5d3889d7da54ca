"""Synchronous training loop: generate, score, train, sync; evaluate and save at intervals.

Data flows one way through the functions below. What a step needs is in :class:`Loop`; what it made is in the
metrics that it returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

from anygauge.algorithms.on_policy import ON_POLICY
from anygauge.config import Config
from anygauge.config.rules.algorithm import estimator
from anygauge.failures import in_background
from anygauge.observability.distributions import record_distributions
from anygauge.observability.evaluation import group_numbers
from anygauge.observability.logs import summary
from anygauge.observability.memory import driver_memory
from anygauge.observability.metric_functions import custom_metrics, metric_functions
from anygauge.observability.metrics import (
    StepWork,
    conversation_metrics,
    performance_metrics,
    rollout_metrics,
    train_datasets,
)
from anygauge.observability.phases import Row, record_phase, take_phases
from anygauge.observability.samples import is_recorded
from anygauge.rollout.producer import RolloutsStopped
from anygauge.rollout.rewards import raw_number
from anygauge.run_directory.dumps import (
    batch_path,
    keep_media,
    read_batches,
    rollout_path,
    write_groups,
)
from anygauge.runtime.signals import postpone_first
from anygauge.runtime.worker_group import PendingCall
from anygauge.trainer.estimate import group_advantages
from anygauge.trainer.evaluation import evaluate
from anygauge.trainer.health import HealthMonitor, health_metrics
from anygauge.trainer.loop_state import Loop
from anygauge.trainer.plan import conversation_batch, plan_metrics, plan_steps, rollout_batch
from anygauge.trainer.profiling import profiled, warn_of_done_steps
from anygauge.trainer.replay import shown_in
from anygauge.trainer.saving import save, save_last, save_on_error, tell_of_wait
from anygauge.trainer.staleness import mask_stale
from anygauge.trainer.state import TRAINING
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Group, Prompt

__all__ = ["run_loop"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Training:
    """Optimizer steps that the workers are taking."""

    answer: PendingCall
    """Pending call, which returns from each worker the metrics of every optimizer step."""
    planned: Mapping[str, float]
    """Metrics of how the samples were divided."""
    updates: bool
    """Whether the policy is trained, or the critic alone."""


def run_loop(loop: Loop, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Run the remaining steps, or stop early when asked to.

    A signal ends the run after the step that is being trained, or before the next one, with a checkpoint; if
    that would save nothing new, and at a second signal, the run ends at once.

    :param should_stop: Asked after each step, once observers and health rules have seen it.
    """
    with postpone_first(partial(request_stop, loop)):
        with suppress(RolloutsStopped):
            take_steps(loop, should_stop)
        if loop.is_stopping:
            save_last(loop)
    loop.directory.check()


def take_steps(loop: Loop, should_stop: Callable[[], bool]) -> None:
    """Take the remaining steps; the argument is that of :func:`run_loop`."""
    config, total = loop.config, loop.config.run.steps
    loop.first_step = loop.info.step + 1
    take_step = choose_step(config)
    monitor = HealthMonitor(config, Path(loop.info.directory), loop.info.step)
    functions = metric_functions(config.run.metrics, loop.session.plugins)
    warn_of_done_steps(config.profile.steps, loop.info.step)
    loop.session.plugins.notify("before_train", run=loop.info)
    if not loop.info.step:
        evaluate(loop.session)
    elif not loop.session.state.is_evaluated:
        evaluate_if_due(loop)
    elif loop.background is not None and loop.info.step % config.eval.interval == 0:
        loop.background.start()  # again: the record of one that was under way at the checkpoint is set aside
    for step in range(loop.first_step, total + 1):
        loop.directory.check()
        with save_on_error(loop, step):
            loop.session.plugins.notify("before_train_step", run=loop.info)
        with profiled(loop.session, step), record_phase(f"step {step}"):
            metrics = take_step(loop, step)
        if loop.save_s:
            metrics["perf/save_time"] = loop.save_s
        loop.session.state.finish_step(step)
        with save_on_error(loop, step):
            try:
                metrics |= custom_metrics(functions, loop.groups, metrics, step=step)
            finally:  # the step is complete, whatever a function of the user does
                loop.groups = ()
                close_step(loop, monitor, metrics, step)
            ends = step < total and should_stop()
            evaluate_if_due(loop, ends=ends)
            loop.directory.check()
        started = time.perf_counter()
        with record_phase("save"):
            is_saved = save(loop, step, ends=ends)
        loop.save_s = time.perf_counter() - started if is_saved else 0.0
        loop.session.add_phases(Row("driver"), take_phases())
        if ends or loop.is_stopping:
            _log.info("the run was told to stop after step %d of %d", step, total)
            break


def close_step(loop: Loop, monitor: HealthMonitor, metrics: Mapping[str, float], step: int) -> None:
    """Record a step, show it, and evaluate the health rules, also where an observer raises an error."""
    loop.session.track(metrics, step=step)
    _log.info("step %d of %d: %s", step, loop.info.total_steps, summary(metrics))
    try:
        loop.session.plugins.notify("after_train_step", run=loop.info, metrics=metrics)
    finally:
        loop.directory.check()  # the health file is written anew
        monitor.check(metrics, step)


def request_stop(loop: Loop) -> bool:
    """Return whether there is a step to save, and if so, make the run end once it is saved.

    Called in a signal handler, so another thread tells the user: this one may be printing.
    """
    if loop.checkpoints is None or loop.trained <= loop.checkpoints.complete:
        return False
    loop.is_stopping = True
    if loop.rollouts is not None:
        loop.rollouts.stop()
    text = f"saving step {loop.trained} when it is done; Ctrl-C again to stop at once"
    in_background(partial(tell_of_wait, loop.session.plugins, loop.session.state, text), "stop")
    return True


def evaluate_if_due(loop: Loop, *, ends: bool = False) -> None:
    """Evaluate after the last step and after every so many; record what was evaluated meanwhile.

    :param ends: Whether this step is the last one before its time.
    """
    step, total = loop.info.step, loop.config.run.steps
    if loop.background is not None:
        loop.background.collect()
    if ends or step == total:
        if loop.background is not None:
            loop.background.finish()
        evaluate(loop.session, tolerant=True)
    elif step % loop.config.eval.interval == 0:
        if loop.background is None:
            evaluate(loop.session, tolerant=True)
        else:
            loop.background.start()
    loop.session.state.is_evaluated = True


def choose_step(config: Config) -> Callable[[Loop, int], dict[str, float]]:
    """Return what takes the steps of a run."""
    if config.debug.replay_batches is not None:
        return train_on_batches
    return train_on_conversations if config.run.task == "sft" else train_on_rollouts


def train_on_rollouts(loop: Loop, step: int) -> dict[str, float]:
    """Take one RL step and return its metrics."""
    started = time.perf_counter()
    config = loop.config
    assert loop.rollouts is not None, "the run trains on rollouts"
    with record_phase("generate"), save_on_error(loop, step):
        groups, reward_s = loop.rollouts.collect(step)
    loop.groups, loop.trained = groups, step
    version = None if replays_rollouts(config) else loop.session.state.version
    trained_on = groups if version is None else mask_stale(groups, version, config.algorithm.mask_stale)
    training, batch = None, None
    if loop.session.components.trains and are_any_scored(trained_on):
        batch = rollout_batch(trained_on, version)
        training = start_training(loop, step, batch)
    # While the workers train, the driver does what needs nothing of them.
    loop.session.plugins.notify("after_rollout", run=loop.info, groups=groups)
    record(loop, step, groups, batch)
    read_ahead(loop, step)
    if config.debug.dump_rollouts:
        write_groups(rollout_path(loop.dumps, step), trained_on, loop.model)
        keep(loop, shown_in(trained_on))
    raw = partial(raw_number, reward=config.reward)
    datasets = train_datasets(config)
    names = loop.session.state.part_names[TRAINING]
    sampled = rollout_metrics(groups, raw, datasets=datasets, version=version, names=names) | driver_memory()
    sampled |= loop.rollouts.metrics()
    if loop.session.media is not None:
        sampled |= {"rollout/media_tokens": media_tokens(groups)} | loop.session.media.metrics()
    work = StepWork.of_groups(groups, *loop.flops)
    trained = {} if training is None else finish_training(loop, training)
    return {**trained, **sampled, **measure(loop, work, started, reward=reward_s)}


def record(loop: Loop, step: int, groups: Sequence[Group], batch: TrainBatch | None) -> None:
    """Record the distributions of a step whose samples are recorded.

    Advantages are among them if the estimator is one of groups.
    """
    if not is_recorded(step, loop.info.total_steps):
        return
    config = loop.config
    numbers = group_numbers(groups, partial(raw_number, reward=config.reward))
    named = estimator(config, loop.session.plugins)
    advantages: Sequence[float] = ()
    if batch is not None and named is not None and named.kind == "group":
        advantages = group_advantages(config.algorithm, named, batch.group_rewards)
    values = {
        "reward": chain.from_iterable(numbers),
        "prompt_reward": [fmean(each) for each in numbers if each],
        "length": (len(sample.response_tokens) for group in groups for sample in group.samples),
        "advantage": advantages,
    }
    record_distributions(Path(loop.info.directory), step, values)


def media_tokens(groups: Sequence[Group]) -> float:
    """Return how many tokens of a sample hold places of media, on average."""
    counts = [sum(each.num_tokens for each in sample.media) for group in groups for sample in group.samples]
    return fmean(counts) if counts else 0.0


def keep(loop: Loop, media: Sequence[Media]) -> None:
    """Write what samples show beside the dumps of them."""
    if loop.session.media is not None and media:
        keep_media(loop.dumps, media, loop.session.media.store)


def replays_rollouts(config: Config) -> bool:
    """Return whether groups are of another run, which has masked what was too old and had other versions."""
    return config.debug.replay_rollouts is not None


def are_any_scored(groups: Sequence[Group]) -> bool:
    """Return whether there is a reward to learn from; an optimizer step without any would only add noise."""
    if any(sample.error is None and any(sample.loss_mask) for group in groups for sample in group.samples):
        return True
    _log.warning("no sample of the step has a token and a reward: it trains nothing")
    return False


def train_on_conversations(loop: Loop, step: int) -> dict[str, float]:
    """Take one SFT step and return its metrics."""
    started = time.perf_counter()
    with save_on_error(loop, step):
        rows = loop.next_prompts or draw_prompts(loop)
        if isinstance(rows, Exception):
            raise rows
    loop.trained = step
    batch = conversation_batch(rows)
    training = start_training(loop, step, batch)
    read_ahead(loop, step)
    read = conversation_metrics(rows, datasets=train_datasets(loop.config)) | driver_memory()
    if loop.session.media is not None:
        read |= loop.session.media.metrics()
    work = StepWork.of_batches([batch], *loop.flops)
    return {**finish_training(loop, training), **read, **measure(loop, work, started)}


def train_on_batches(loop: Loop, step: int) -> dict[str, float]:
    """Train again on what each rank of another run trained on in a step, and return its metrics."""
    started = time.perf_counter()
    assert loop.config.debug.replay_batches is not None
    batches = read_batches(loop.config.debug.replay_batches, step, loop.session.layout.data, loop.model)
    loop.replayed_media.restore(loop.config.debug.replay_batches, media_of(batches))
    training = send_batches(loop, step, batches)
    work = StepWork.of_batches(batches, *loop.flops)
    memory = driver_memory()
    return {**finish_training(loop, training), **memory, **measure(loop, work, started)}


def media_of(batches: Sequence[TrainBatch]) -> list[Media]:
    """Return the media of all samples."""
    return [each for batch in batches for media in batch.media for each in media]


def start_training(loop: Loop, step: int, batch: TrainBatch) -> Training:
    """Divide the samples of a step among the data-parallel ranks, and let them train."""
    config = loop.config
    batches = plan_steps(
        batch,
        config.optimizer_steps,
        loop.session.layout.data,
        config.algorithm.loss_aggregation,
        loop.flops_per_token,
        config.rollout.max_new_tokens,
        loop.media_flops,
        packs_prefixes=config.train.prefix_packing,
    )
    return send_batches(loop, step, batches)


def send_batches(loop: Loop, step: int, batches: Sequence[TrainBatch]) -> Training:
    """Let each rank train on the batch of its data-parallel rank."""
    layout, dumps = loop.session.layout, dict[int, str]()
    if loop.config.debug.dump_batches:
        paths = (batch_path(loop.dumps, step, dp_rank) for dp_rank in range(layout.data))
        dumps = {rank: str(path) for rank, path in zip(layout.reporting_ranks(), paths, strict=True)}
        keep(loop, media_of(batches))
    per_rank = [((batches[own],), {"dump": dumps.get(rank)}) for rank, own in enumerate(layout.dp_ranks())]
    updates = step > loop.config.critic.warmup_steps
    answer = loop.session.workers.call_async("train", per_rank=per_rank, update_policy=updates)
    packs_prefixes = loop.config.train.prefix_packing
    metrics = plan_metrics(batches, loop.flops_per_token, loop.media_flops, packs_prefixes=packs_prefixes)
    return Training(answer, metrics, updates)


def finish_training(loop: Loop, training: Training) -> dict[str, float]:
    """Wait for the workers, give the new weights to the rollout engines, and return the metrics of both."""
    with record_phase("train"):
        steps = training.answer.result()[0]
    if training.updates:
        sync_weights(loop)
    return {**prefixed("train", mean_over_steps(steps)), **health_metrics(steps[0]), **training.planned}


def read_ahead(loop: Loop, step: int) -> None:
    """Draw the prompts of the next step, having noted where the source stood before."""
    goes_on = step < loop.info.total_steps
    if loop.rollouts is not None:
        loop.rollouts.read_ahead(loop.session.state, goes_on=goes_on)
        return
    loop.session.state.source = loop.source.state_dict()
    loop.next_prompts = draw_prompts(loop) if goes_on else ()


def draw_prompts(loop: Loop) -> Sequence[Prompt] | Exception:
    """Return the conversations of one step, or the error, which ends the step that needs them."""
    try:
        return loop.source.next(loop.config.rollout.prompts_per_step)
    except Exception as error:  # noqa: BLE001 - foreign code: a data source
        return error


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric; the log-prob difference to the engine is that of the first step.

    Only before the first step do trainer and engine hold the same weights.
    """
    names = (name for name in steps[0] if name not in ON_POLICY)
    means = {name: sum(step[name] for step in steps) / len(steps) for name in names}
    first = steps[0].get("current_rollout_logprob_abs_diff")
    if first is not None:
        del means["current_rollout_logprob_abs_diff"]
        means["train_rollout_logprob_abs_diff"] = first
    return means


def sync_weights(loop: Loop) -> None:
    """Give the new weights to every rollout engine, where there is one."""
    if not loop.session.components.generates:
        return
    loop.session.engines.trained(loop.session.state.version + 1)
    if loop.rollouts is not None:
        loop.rollouts.before_sync()
    loop.session.state.version += 1
    with record_phase("sync"):
        loop.session.engines.sync(loop.session.state.version)
    if loop.rollouts is not None:
        loop.rollouts.advance(loop.session.state.version)
    loop.session.plugins.notify("after_weight_sync", run=loop.info, version=loop.session.state.version)


def measure(loop: Loop, work: StepWork, started: float, **driver_seconds: float) -> dict[str, float]:
    """Return ``perf/*`` of a step that began at ``started``.

    :param driver_seconds: Time of the driver's own work, by phase.
    """
    return performance_metrics(
        work,
        loop.session.reports(),
        wall_s=time.perf_counter() - started,
        driver_seconds={**driver_seconds, **loop.session.colocation.seconds()},
    )


def prefixed(group: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under ``<group>/<name>``."""
    return {f"{group}/{name}": value for name, value in metrics.items()}
