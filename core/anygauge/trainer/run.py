"""One run, from a checked config to a trained model or to an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anygauge.config import Config
from anygauge.config.load import LoadedConfig
from anygauge.config.roles import Components
from anygauge.config.secret_values import secret_values
from anygauge.data.media.finder import MediaFinder
from anygauge.data.media.loader import LoadedSource, MediaLoader
from anygauge.hub import localized
from anygauge.observability.logs import driver_log
from anygauge.observability.phases import record_phase, take_phases
from anygauge.observability.reward_parts import PartNames
from anygauge.observability.run_facts import run_facts
from anygauge.observability.start_status import StartStatus
from anygauge.observability.timeline import TIMELINE_FILE, Timeline
from anygauge.observability.trackers import open_tracker, tracker_names
from anygauge.plugins import Plugins
from anygauge.rollout.rewards import Scorer
from anygauge.run_directory.capabilities import write_capabilities
from anygauge.run_directory.checkpoints import CheckpointWriter
from anygauge.run_directory.directory import RunDirectory
from anygauge.run_directory.dumps import model_facts
from anygauge.runtime.media_stores import own_store
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.serving.colocation import ColocationScheduler
from anygauge.serving.engines import open_engines
from anygauge.serving.memory_fit import MemoryFit
from anygauge.serving.server_plan import plan_servers
from anygauge.trainer.actors import replays
from anygauge.trainer.background_evaluation import BackgroundEvaluation
from anygauge.trainer.generation import open_maker
from anygauge.trainer.inputs import EvalSet, Inputs, forbidden_tokens, read_inputs
from anygauge.trainer.loop import run_loop
from anygauge.trainer.loop_state import Loop
from anygauge.trainer.replay import ReplayedMedia, ReplayedRollouts
from anygauge.trainer.rollout_scheduler import GroupSource, open_rollout_scheduler
from anygauge.trainer.saving import announce, finish_saving, tell_of_wait
from anygauge.trainer.session import Session
from anygauge.trainer.start import (
    Processes,
    StartedRun,
    run_info,
    start_processes,
    start_run,
    starting_line,
)
from anygauge.trainer.state import TRAINING, RunState
from anygauge_hooks.data import DataSource
from anygauge_hooks.errors import DataError
from anygauge_hooks.types import RunInfo, Tracker

__all__ = ["open_session", "train", "train_started"]

logger = logging.getLogger(__name__)


def train(
    loaded: LoadedConfig,
    plugins: Plugins,
    *,
    when_built: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunInfo:
    """Run a config to its end.

    :param loaded: From :func:`anygauge.config.load.load_config`.
    :param when_built: Called once all processes and objects of the run are there, before its first step.
    :param should_stop: Asked after each step; the run then ends as after its last step, with a checkpoint.
    :returns: The run as it ended.
    """
    with start_run(loaded, plugins, check=loaded.check_models) as started:
        return train_started(loaded, plugins, started, when_built=when_built, should_stop=should_stop)


def train_started(
    loaded: LoadedConfig,
    plugins: Plugins,
    started: StartedRun,
    *,
    when_built: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunInfo:
    """Run a config to its end, whose processes come up already.

    Data and rewards are checked meanwhile. The run directory is opened after that: until then an earlier run
    there is as it was.

    :param started: From :func:`anygauge.trainer.start.start_run`.
    :param when_built: As of :func:`train`, as is ``should_stop``.
    """
    config = loaded.config
    inputs = read_inputs(config, plugins)
    started.processes.times.note("data")
    secrets = secret_values(config)
    facts = run_facts(secrets) | plugins.environment()
    directory = started.directory.open(facts)
    state = RunState(
        run_info(loaded, directory.path, facts),
        source=inputs.source.state_dict(),
        best=config.save.best,
        part_names={TRAINING: PartNames()} | {each.name: each.part_names for each in inputs.eval_sets},
    )
    if directory.checkpoint is not None:
        fresh = state.source
        state.restore(directory.checkpoint.state)
        _restore_source(inputs.source, state, fresh, config)
    log = driver_log(directory.path, backend=state.info.where, secrets=secrets)
    with log, ExitStack() as stack, notify_observers(plugins, state):
        take_phases()  # those of an earlier run of this process
        with record_phase("start"):
            loop = open_loop(loaded, plugins, inputs, directory, state, started, stack)
        when_built()
        with loop.session.timed_to_the_end(), salvaged(loop):
            run_loop(loop, should_stop)
            finish_saving(loop)
        if loop.checkpoints is not None:
            loop.checkpoints.require_last()
    return state.info


def _restore_source(source: DataSource, state: RunState, fresh: Mapping[str, Any], config: Config) -> None:
    """Let the data go on where a checkpoint stood; other data, which the config accepts, begin.

    :param fresh: State of the source at its beginning.
    :raises DataError: The data are others, and the config does not accept that.
    """
    try:
        source.load_state_dict(state.source)
    except DataError as error:
        if "data" not in config.run.accept_changes:
            raise
        logger.warning("%s The new data start from their beginning.", error.args[0])
        state.source, state.rollout = fresh, {}


def open_loop(
    loaded: LoadedConfig,
    plugins: Plugins,
    inputs: Inputs,
    directory: RunDirectory,
    state: RunState,
    started: StartedRun,
    stack: ExitStack,
) -> Loop:
    """Start what the steps of a run share, and go to where an earlier part of it ended; the stack ends it."""
    config, components = loaded.config, started.components
    checkpoint = None if directory.checkpoint is None else directory.checkpoint.path
    tell = partial(tell_of_wait, plugins, state)
    session = open_session(
        loaded,
        plugins,
        components,
        inputs.eval_sets,
        state,
        stack,
        checkpoint=checkpoint,
        media=inputs.media,
        tell=tell,
        processes=started.processes,
    )
    source = inputs.source if session.media is None else LoadedSource(inputs.source, session.media)
    if directory.continues:
        directory.begin()
    write_capabilities(directory.path, plugins, loaded.backend)
    checkpoints = None
    if config.save.every is not None and components.trains and not replays(config):
        writer = CheckpointWriter(directory.path, config, session.workers, tell, scores=state.scores)
        checkpoints = stack.enter_context(closing(writer))
    session.trackers = open_trackers(config, plugins, state.info, stack)
    if config.profile.timeline:
        session.timeline = stack.enter_context(closing(Timeline(directory.path / TIMELINE_FILE)))
    replayed_media = ReplayedMedia(session.media)
    rollouts: GroupSource | None = None
    background = None
    if config.debug.replay_rollouts is not None:
        model = model_facts(localized(config, data=False).model.path)
        rollouts = ReplayedRollouts(config.debug.replay_rollouts, model, replayed_media)
    elif session.maker is not None and config.run.task != "sft":
        rollouts = scheduler = stack.enter_context(open_rollout_scheduler(session, session.maker, source))
        if config.rollout.schedule != "sync" and not config.eval.wait:
            background = BackgroundEvaluation(session, rollouts=scheduler.rollouts)
    return Loop(
        session=session,
        directory=directory,
        source=source,
        flops_per_token=inputs.flops_per_token,
        media_flops=inputs.media_flops,
        checkpoints=checkpoints,
        rollouts=rollouts,
        replayed_media=replayed_media,
        background=background,
    )


def open_session(
    loaded: LoadedConfig,
    plugins: Plugins,
    components: Components,
    eval_sets: Sequence[EvalSet],
    state: RunState,
    stack: ExitStack,
    *,
    checkpoint: Path | None,
    media: MediaFinder | None = None,
    tell: Callable[[str], None] = logger.info,
    processes: Processes | None = None,
) -> Session:
    """Start the scorers, the workers and the engines, and wait for them; the stack ends them.

    :param components: Components that are built.
    :param checkpoint: Loaded into the train engines, and from there into the rollout engines.
    :param media: Finder of the run's media; ``None`` for a run of text.
    :param tell: Called with a line about what is waited for.
    :param processes: Workers and engines that come up already; ``None`` starts them.
    """
    config, directory = loaded.config, Path(state.info.directory)
    stack.enter_context(single_torch_thread())
    scorers = open_scorers(config, plugins, eval_sets, directory, stack) if components.generates else {}
    loader = None
    if media is not None:
        # Closed after the workers, which may be reading.
        loader = stack.enter_context(closing(MediaLoader(own_store(config, directory), media)))
    if processes is None:
        tell(starting_line(config, components))
        reads = [] if checkpoint is None else [checkpoint]
        processes = start_processes(loaded, plugins, components, directory, stack, reads=reads)
    else:
        stack.push(processes.stack.pop_all())
        tell("the data are read; waiting for the training workers (logs/actor-*)")
    workers, rollouts, times = processes.workers, processes.rollouts, processes.times
    with workers.watched(StartStatus(tell, "training workers")):
        workers.ready()
    times.note("workers")
    if rollouts is not None:
        tell("the training workers are ready; waiting for the rollout engines (logs/rollout-*)")
    if checkpoint is not None:
        workers.call("load_checkpoint", path=str(checkpoint))
    colocation = open_colocation(config, components, workers, tell)
    with watched_start(config, rollouts, tell):
        engines = stack.enter_context(
            open_engines(config, plugins, components, workers, rollouts, directory, colocation)
        )
    times.note("engines")
    logger.info("start: %s", times)
    # The engines have loaded model.path, and lack what training starts from beside it: an adapter, or the
    # values of a 4-bit base.
    if checkpoint is not None or (components.trains and config.starts_elsewhere):
        engines.sync(state.version)
    maker = None
    if components.generates:
        maker = open_maker(config, plugins, stack.enter_context(engines.generation_client()), loader)
    forbidden = forbidden_tokens(config, plugins)
    return Session(
        config,
        plugins,
        components,
        workers,
        engines,
        eval_sets,
        scorers,
        state,
        colocation,
        maker,
        forbidden,
        loader,
    )


def watched_start(
    config: Config, rollouts: WorkerGroup | None, tell: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Tell how far the rollout engines are while the block waits for them.

    Not where some start after others: the workers of those that are not to start yet answer at once.
    """
    if rollouts is None or len({plan.wave for plan in plan_servers(config)}) > 1:
        return nullcontext()
    return rollouts.watched(StartStatus(tell, "rollout engines"))


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Let torch compute with one thread in this process.

    The driver only copies short columns. Further threads spin for more work after each copy, on the cores of
    the workers.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def open_colocation(
    config: Config, components: Components, workers: WorkerGroup, tell: Callable[[str], None]
) -> ColocationScheduler:
    """Return the colocation scheduler; on shared devices the trainers sleep, so that servers can start."""
    if not (config.placement.sleeps and components.trains and components.generates):
        return ColocationScheduler()
    fit = None
    if config.placement.offload == "auto":
        fit = MemoryFit(lambda: workers.call("device_memory"), 2 * config.weight_sync.bucket_bytes)
    colocation = ColocationScheduler(
        lambda state: workers.call("set_memory_state", state=state), fit=fit, tell=tell
    )
    workers.before_calls(colocation.before_call)
    colocation.enter("start")
    return colocation


def open_scorers(
    config: Config, plugins: Plugins, eval_sets: Sequence[EvalSet], directory: Path, stack: ExitStack
) -> dict[str, Scorer]:
    """Return what scores the training samples, and each evaluation data set; the stack closes them.

    Data sets without a reward of their own share the training's.
    """
    wanted = {TRAINING: config.reward, **{s.name: s.settings.reward or config.reward for s in eval_sets}}
    lengths = {TRAINING: None, **{s.name: s.settings.max_new_tokens for s in eval_sets}}
    labels = {TRAINING: config.data.label_key, **{s.name: s.settings.label_key for s in eval_sets}}
    scorers: dict[str, Scorer] = {}
    for name, reward in wanted.items():
        if not (reward.function or reward.parts):
            continue
        if name and reward is config.reward:
            scorers[name] = scorers[TRAINING]
            continue
        log = directory / "logs" / f"scorer{f'-{name}' if name else ''}.log"
        limit = lengths[name] or config.rollout.max_new_tokens
        made = Scorer(
            reward,
            plugins,
            max_new_tokens=limit,
            log=log,
            deadline_s=config.run.timeout_s,
            label_key=labels[name],
            is_chat=config.data.apply_chat_template,
        )
        scorers[name] = stack.enter_context(made)
        scorers[name].start()  # while the workers start
    return scorers


def open_trackers(config: Config, plugins: Plugins, info: RunInfo, stack: ExitStack) -> list[Tracker]:
    """Return the run's trackers; the stack closes them."""
    trackers: list[Tracker] = []
    for name in tracker_names(config):
        trackers.append(open_tracker(name, plugins, info))
        stack.callback(trackers[-1].close)
    return trackers


@contextmanager
def salvaged(loop: Loop) -> Iterator[None]:
    """Keep the checkpoint that is being written when the block breaks off, if the ranks have written it.

    :raises CheckpointError: The run directory is gone, which is why the block broke off.
    """
    with ExitStack() as block:
        block.push(lambda kind, error, _: _salvage(loop, error))
        yield


def _salvage(loop: Loop, error: BaseException | None) -> None:
    if isinstance(error, Exception):
        loop.directory.check()
    if error is not None and loop.checkpoints is not None:
        try:
            announce(loop, loop.checkpoints.salvage(are_writing=not loop.session.workers.is_ended))
        except Exception as lost:  # noqa: BLE001 - foreign code: plugins hear of it; `error` must be seen
            logger.warning("the checkpoint that was being written is lost: %r", lost)


@contextmanager
def notify_observers(plugins: Plugins, state: RunState) -> Iterator[None]:
    """Tell the observers of an error, and of the end, while the workers are still there."""
    with ExitStack() as block:
        block.callback(lambda: plugins.notify("after_train", run=state.info))  # as it ended
        block.push(lambda kind, error, _: _notify_of(error, plugins, state))
        yield


def _notify_of(error: BaseException | None, plugins: Plugins, state: RunState) -> None:
    if error is not None:
        plugins.notify("on_error", run=state.info, error=error)
