"""Rollout engines of a run: embedded in the training workers, or in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from anygauge.config import Config
from anygauge.config.roles import Components
from anygauge.observability.performance import WorkerReport
from anygauge.plugins import Plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.serving.colocated_engines import ColocatedEngines
from anygauge.serving.colocation import ColocationScheduler
from anygauge.serving.embedded_generator import embedded_client
from anygauge.serving.generation_client import GenerationClient
from anygauge.serving.served_engines import ServedEngines, devices_of_server, open_servers, push_weights
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.types import BackendSpec
from anygauge_hooks.weights import WeightPeer, WeightTransportSpec

__all__ = ["Engines", "SeparateEngines", "SharedEngines", "is_served", "launch_engines", "open_engines"]

ROLLOUT = "anygauge.serving.rollout_workers:RolloutWorker"
SERVER = "anygauge.serving.server_workers:ServerWorker"
GRACE_S = 5.0
"""For an engine's own error to arrive, after an update that did not get to every engine."""


class Engines(Protocol):
    """Interface of the rollout engines for the training loop."""

    def generation_client(self) -> AbstractContextManager[GenerationClient]:
        """Return a generation client of the engines, for as long as the block runs."""

    def trained(self, version: int) -> None:
        """Learn that the workers that train have a version now, which :meth:`sync` gives to every engine."""

    def sync(self, version: int) -> None:
        """Give the trained weights to every engine."""

    def start_profile(self, kind: str, directory: Path, ranks: Collection[int]) -> Sequence[str | None]:
        """Begin a profile of the engines' processes, except training workers; return what went wrong.

        :param ranks: Engines to record; none for all.
        """

    def stop_profile(self) -> Sequence[str | None]:
        """Have the profiles written, if there are any; return what went wrong."""

    def reports(self) -> Sequence[WorkerReport]:
        """Return and reset the reports of the engines' processes, except training workers."""


class SharedEngines:
    """An engine in each worker that trains.

    :param workers: Those with the engines.
    :param trainers: Those that train; ``None`` where nothing is trained, or generated.
    """

    def __init__(self, workers: WorkerGroup, trainers: WorkerGroup | None) -> None:
        self._workers = workers
        self._trainers = trainers

    def generation_client(self) -> AbstractContextManager[GenerationClient]:
        """Return a generation client of the engines."""
        return embedded_client(self._workers)

    def trained(self, version: int) -> None:
        """Do nothing: no engine joins the others later."""

    def sync(self, version: int) -> None:
        """Give the trained weights to every engine."""
        if self._trainers is not None:
            push_weights(self._trainers, version)

    def start_profile(self, kind: str, directory: Path, ranks: Collection[int]) -> Sequence[str | None]:
        """Do nothing: the profiles of the training workers have their engines."""
        return ()

    def stop_profile(self) -> Sequence[str | None]:
        """Do nothing, as :meth:`start_profile`."""
        return ()

    def reports(self) -> Sequence[WorkerReport]:
        """Return nothing: the training workers report for their engines."""
        return ()


class SeparateEngines(SharedEngines):
    """Engines in their own processes."""

    def __init__(self, workers: WorkerGroup, trainers: WorkerGroup | None) -> None:
        super().__init__(workers, trainers)
        self._peers: Sequence[WeightPeer] = workers.call("peer")

    def sync(self, version: int) -> None:
        """Give the trained weights to every engine.

        :raises WorkerFailedError: An engine raised an error.
        :raises RolloutError: An engine did not get the weights.
        """
        if self._trainers is None:
            return
        taking = self._workers.call_async("take_weights", version=version)
        reports = push_weights(self._trainers, version, self._peers, [0] * len(self._peers))
        for failed in (peer for report in reports for peer in report.failed):
            with suppress(DeadlineError):
                taking.result(GRACE_S)
            raise RolloutError(f"The engine at {failed.address} got no weights: {failed.error}")
        taking.result()

    def start_profile(self, kind: str, directory: Path, ranks: Collection[int]) -> Sequence[str | None]:
        """Begin a profile of the engines' processes."""
        return self._workers.call("start_profile", kind=kind, directory=str(directory), ranks=tuple(ranks))

    def stop_profile(self) -> Sequence[str | None]:
        """Have the profiles written."""
        return self._workers.call("stop_profile")

    def reports(self) -> Sequence[WorkerReport]:
        """Return and reset the reports of the engines' processes."""
        reports: list[WorkerReport] = self._workers.call("report")
        return reports


def _served(
    config: Config, plugins: Plugins, colocation: ColocationScheduler
) -> Callable[..., ServedEngines]:
    """Return the factory of the engines that are servers.

    Where weights are handed over in memory, the first trainer on a server's devices does so: a server sees no
    other devices.
    """
    if not config.placement.colocated:
        return ServedEngines
    transport: WeightTransportSpec = plugins.get("register_weight_transports", config.weight_sync.transport)
    devices = devices_of_server(config, plugins) if transport.same_host else 0
    make = partial(ColocatedEngines, colocation=colocation) if colocation.shared else ServedEngines
    return partial(make, sender=lambda server: server * devices)


def launch_engines(
    config: Config,
    backend: BackendSpec,
    plugins: Plugins,
    components: Components,
    trainers: WorkerGroup,
    directory: Path,
) -> WorkerGroup | None:
    """Start the workers of rollout engines that are processes of their own; none is waited for.

    :param trainers: Launched, and not necessarily ready. They are ended after these workers.
    :param directory: The run's directory.
    :returns: A context manager that ends the workers; ``None`` if the run has none.
    """
    count, colocated = config.placement.rollout_workers, config.placement.colocated
    if not (config.has_engines_apart and components.generates) or config.rollout.external:
        return None
    launch = partial(
        launch_workers,
        config,
        backend,
        plugins,
        role="rollout",
        run_directory=directory,
        num_workers=count,
        collective=False,
        first_device=0 if colocated else config.placement.train_workers,
        wait=False,
    )
    if not is_served(config, plugins):
        return launch(worker_class=ROLLOUT)
    devices = devices_of_server(config, plugins)
    seats = trainers.seats(count, devices) if colocated and config.placement.launcher == "ray" else ()
    return launch(worker_class=SERVER, devices=devices, seats=seats, computes=False)


def is_served(config: Config, plugins: Plugins) -> bool:
    """Return whether the rollout engines are servers, which a worker looks after."""
    spec: RolloutEngineSpec = plugins.get("register_rollout_engines", config.rollout.engine)
    return spec.serve is not None


@contextmanager
def open_engines(
    config: Config,
    plugins: Plugins,
    components: Components,
    trainers: WorkerGroup,
    workers: WorkerGroup | None,
    directory: Path,
    colocation: ColocationScheduler,
) -> Iterator[Engines]:
    """Wait until the rollout engines serve, and close their clients after.

    :param trainers: Those that train, which are ready.
    :param workers: From :func:`launch_engines`.
    :param directory: The run's directory.
    :param colocation: Scheduler that engines and trainers obey where they share devices.
    """
    senders = trainers if components.trains and components.generates else None
    if not (config.has_engines_apart and components.generates):
        yield SharedEngines(trainers, senders)
    elif workers is None or is_served(config, plugins):
        if workers is not None:
            workers.ready()
        make = _served(config, plugins, colocation)
        with open_servers(config, plugins, workers, senders, directory, make) as servers:
            yield servers
    else:
        workers.ready()
        yield SeparateEngines(workers, senders)
