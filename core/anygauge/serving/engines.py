"""Rollout engines of a run: embedded in the training workers, or in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from anygauge.config import Config
from anygauge.config.roles import Components
from anygauge.plugins import Plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import PendingCall, WorkerGroup
from anygauge.serving.colocated_engines import ColocatedEngines
from anygauge.serving.colocation import ColocationScheduler
from anygauge.serving.embedded_generator import embedded_client
from anygauge.serving.generation_client import GenerationClient
from anygauge.serving.served_engines import ServedEngines, devices_of_server, open_servers
from anygauge.serving.weight_stream import PickledBucket
from anygauge_hooks.types import BackendSpec
from anygauge_hooks.weights import WeightTransportSpec

__all__ = ["Engines", "SeparateEngines", "SharedEngines", "open_engines"]

ROLLOUT = "anygauge.serving.rollout_workers:RolloutWorker"
BUCKET_BYTES = 512 * 2**20


class Engines(Protocol):
    """Interface of the rollout engines for the training loop."""

    def generation_client(self) -> AbstractContextManager[GenerationClient]:
        """Return a generation client of the engines, for as long as the block runs."""

    def trained(self, version: int) -> None:
        """Learn that the workers that train have a version now, which :meth:`sync` gives to every engine."""

    def sync(self, version: int) -> None:
        """Give the trained weights to every engine."""

    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Return and reset the reports of the engines' processes, except training workers."""


class SharedEngines:
    """An engine in each worker that trains."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def generation_client(self) -> AbstractContextManager[GenerationClient]:
        """Return a generation client of the engines."""
        return embedded_client(self._workers)

    def trained(self, version: int) -> None:
        """Do nothing: no engine joins the others later."""

    def sync(self, version: int) -> None:
        """Give the trained weights to every engine."""
        self._workers.call("sync_weights", version=version)

    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Return nothing: the training workers report for their engines."""
        return ()


class SeparateEngines:
    """Engines in processes of their own; new weights pass through the driver, part by part."""

    def __init__(
        self, trainers: WorkerGroup | None, rollouts: WorkerGroup, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._trainers = trainers
        self._rollouts = rollouts
        self._bucket_bytes = bucket_bytes

    def generation_client(self) -> AbstractContextManager[GenerationClient]:
        """Return a generation client of the engines."""
        return embedded_client(self._rollouts)

    def trained(self, version: int) -> None:
        """Do nothing: no engine joins the others later."""

    def sync(self, version: int) -> None:
        """Give the trained weights to every engine. The next part is gathered while one is being loaded."""
        loading: PendingCall | None = None
        last = self._trainers is None
        while self._trainers is not None and not last:
            bucket: PickledBucket = self._trainers.call("next_weights", max_bytes=self._bucket_bytes)[0]
            if loading is not None:
                loading.result()
            last = bucket.last
            loading = self._rollouts.call_async(
                "receive_weights", data=bucket.data, version=version, last=last
            )
        if loading is not None:
            loading.result()

    def reports(self) -> Sequence[Mapping[str, Any]]:
        """Return and reset the reports of the engines' processes."""
        reports: list[Mapping[str, Any]] = self._rollouts.call("report")
        return reports


def colocated(
    config: Config, plugins: Plugins, colocation: ColocationScheduler
) -> Callable[..., ServedEngines]:
    """Return the factory of engines that share the trainers' devices.

    Where weights are handed over in memory, the first trainer on a server's devices does so: a server sees no
    other devices.
    """
    transport: WeightTransportSpec = plugins.get("register_weight_transports", config.weight_sync.transport)
    devices = devices_of_server(config, plugins) if transport.same_host else 0
    return partial(ColocatedEngines, colocation=colocation, sender=lambda server: server * devices)


@contextmanager
def open_engines(
    config: Config,
    backend: BackendSpec,
    plugins: Plugins,
    components: Components,
    workers: WorkerGroup,
    directory: Path,
    colocation: ColocationScheduler,
) -> Iterator[Engines]:
    """Start the rollout engines that are processes of their own, if the config asks for some; end them after.

    :param workers: Those that train.
    :param directory: Of the run.
    :param colocation: That the engines take with the trainers, where they share devices.
    """
    count = config.placement.rollout_workers
    if not (config.has_engines_apart and components.generates):
        yield SharedEngines(workers)
        return
    if plugins.get("register_rollout_engines", config.rollout.engine).serve is not None:
        make = colocated(config, plugins, colocation) if colocation.shared else ServedEngines
        trainers = workers if components.trains else None
        is_seated = config.placement.colocated and config.placement.launcher == "ray"
        seats = workers.seats(count, devices_of_server(config, plugins)) if is_seated else ()
        with open_servers(config, backend, plugins, trainers, directory, make, seats) as servers:
            yield servers
        return
    with launch_workers(
        config,
        backend,
        plugins,
        worker_class=ROLLOUT,
        role="rollout",
        run_directory=directory,
        num_workers=count,
        collective=False,
        first_device=config.placement.train_workers,
    ) as rollouts:
        yield SeparateEngines(workers if components.trains else None, rollouts)
