"""Start of a run's processes, before the driver has imported torch or read any data.

Nothing here imports torch: the workers import it meanwhile, which takes longer than all that the driver does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from anygauge.config import Config
from anygauge.config.load import LoadedConfig
from anygauge.config.roles import Components, run_components
from anygauge.observability.start_times import StartTimes
from anygauge.plugins import Plugins
from anygauge.run_directory.directory import ReservedDirectory, reserve_run_directory
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.signals import terminate_as_exception
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.serving.engines import is_served, launch_engines
from anygauge.serving.served_engines import devices_of_server
from anygauge.trainer.first_check import check_first
from anygauge.wording import counted
from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.types import RunInfo

__all__ = ["Processes", "StartedRun", "run_info", "start_processes", "start_run"]

ACTOR = "anygauge.trainer.actors:ActorWorker"


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes that come up."""

    workers: WorkerGroup
    """Those that train."""
    rollouts: WorkerGroup | None
    """Those of rollout engines, if these are processes of their own."""
    stack: ExitStack
    """Ends them when it is closed."""
    times: StartTimes


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run whose processes come up, and whose data are yet to be read."""

    directory: ReservedDirectory
    components: Components
    processes: Processes


@contextmanager
def start_run(
    loaded: LoadedConfig, plugins: Plugins, *, check: Callable[[], None] = lambda: None
) -> Iterator[StartedRun]:
    """Reserve the run's directory and start its processes; the block ends them, and reads the data first.

    Rewards and the first rows are checked before anything else.

    If the block fails before it has opened the directory, that is left as it was found.

    :param loaded: From :func:`anygauge.config.load.load_config`.
    :param check: Raises what makes the run impossible, and takes long. It is called while the processes come
        up; also where they could not be started, which it may explain.
    :raises RewardError: A function cannot be called as a reward.
    :raises DataError: One of the first rows cannot be used.
    :raises CheckpointError: The run cannot have its directory.
    :raises PlacementError: There is no room for the processes.
    """
    config, components = loaded.config, run_components(loaded.config)
    times = StartTimes()
    check_first(config, plugins)
    times.note("config")
    with terminate_as_exception(), ExitStack() as stack:
        try:
            directory = stack.enter_context(reserve_run_directory(config))
            info = run_info(loaded, directory.path, {})
            plugins.notify("on_wait", run=info, message=starting_line(config, components))
            checkpoint = directory.checkpoint
            processes = start_processes(
                loaded,
                plugins,
                components,
                directory.path,
                stack,
                reads=[] if checkpoint is None else [checkpoint.path],
                times=times,
            )
        except AnygaugeError:
            check()
            raise
        if cluster := processes.workers.cluster:
            plugins.notify("on_wait", run=info, message=f"on the {cluster}")
        check()
        times.note("checks")
        yield StartedRun(directory, components, processes)


def start_processes(
    loaded: LoadedConfig,
    plugins: Plugins,
    components: Components,
    directory: Path,
    stack: ExitStack,
    *,
    reads: Sequence[Path] = (),
    times: StartTimes | None = None,
) -> Processes:
    """Start the workers and the engines; none of them is waited for.

    :param components: Components that are built.
    :param directory: The run's directory.
    :param stack: Ends the processes.
    :param reads: Directories that every worker needs, beside those that the config names.
    :param times: Stages of the driver's start so far.
    """
    config = loaded.config
    own = stack.enter_context(ExitStack())
    workers = own.enter_context(
        launch_workers(
            config,
            loaded.backend,
            plugins,
            worker_class=ACTOR,
            role="actor",
            run_directory=directory,
            extra_devices=extra_devices(config, plugins),
            reads=reads,
            options={"components": components},
            wait=False,
        )
    )
    rollouts = launch_engines(config, loaded.backend, plugins, components, workers, directory)
    if rollouts is not None:
        own.enter_context(rollouts)
        rollouts.begin()
    workers.begin()
    if rollouts is not None and is_served(config, plugins):
        rollouts.connect()  # soon, for they import no torch; then the servers start
    times = times or StartTimes()
    times.note("processes")
    return Processes(workers, rollouts, own, times)


def run_info(loaded: LoadedConfig, directory: Path, facts: Mapping[str, str]) -> RunInfo:
    """Return the description of a run for its observers, before the first step.

    :param facts: Facts that plugins report about this host.
    """
    return RunInfo(
        name=loaded.config.run.name,
        directory=str(directory),
        backend=loaded.backend.name,
        total_steps=loaded.config.run.steps,
        config=loaded.config,
        devices=facts.get(loaded.backend.name, ""),
    )


def starting_line(config: Config, components: Components) -> str:
    """Return which processes of a run start, for its terminal."""
    engines = config.placement.rollout_workers if components.generates else 0
    counts = {"training worker": config.placement.train_workers, "rollout engine": engines}
    named = (counted(count, name) for name, count in counts.items() if count)
    return f"starting {' and '.join(named)}"


def extra_devices(config: Config, plugins: Plugins) -> int:
    """Return how many devices the rollout engines take beside those of the workers that train."""
    own = not config.placement.colocated
    return config.placement.rollout_workers * devices_of_server(config, plugins) if own else 0
