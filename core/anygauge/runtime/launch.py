"""Launch a group of workers from the config and the backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.config.schema import Config
from anygauge.device import DETERMINISTIC_ENV
from anygauge.failures import on_failure
from anygauge.plugins import Plugins
from anygauge.runtime.placement import Seat
from anygauge.runtime.ray_environment import set_ray_environment
from anygauge.runtime.worker_group import LaunchSpec, Transport, WorkerGroup
from anygauge_hooks.resources import read_cpus
from anygauge_hooks.types import BackendSpec

__all__ = ["launch_workers", "make_launcher"]

_log = logging.getLogger(__name__)

WORKERS_PER_CORE = 2
"""With more, workers wait for each other to start, and in every step."""

HOST_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the interface of collectives of the host, on every backend."""


def launch_workers(
    config: Config,
    backend: BackendSpec,
    plugins: Plugins,
    *,
    worker_class: str,
    role: str,
    run_directory: Path,
    num_workers: int | None = None,
    collective: bool = True,
    first_device: int = 0,
    devices: int = 1,
    seats: Sequence[Seat] = (),
    extra_devices: int = 0,
    reads: Sequence[Path] = (),
    options: Mapping[str, Any] | None = None,
    computes: bool = True,
    wait: bool = True,
) -> WorkerGroup:
    """Start the workers of a role and return them, ready for calls unless told otherwise.

    :param worker_class: ``"package.module:Class"``, called in each worker with the config and a
        ``WorkerContext``.
    :param role: Names the workers in errors and logs, and decides their environment.
    :param run_directory: Gets ``logs/<role>-<rank>.log``.
    :param num_workers: ``None`` takes ``placement.train_workers``.
    :param collective: Whether the workers form a process group.
    :param first_device: Devices of this host that another role's plain processes take.
    :param devices: Number of devices for each worker.
    :param seats: Places of workers that take devices of others, and none of their own.
    :param extra_devices: Devices that workers of other roles take, which are started afterwards.
    :param reads: Directories that every worker needs, beside those that the config names.
    :param options: Further keyword arguments of the class; they are pickled.
    :param computes: As of :class:`~anygauge.runtime.worker_group.LaunchSpec`.
    :param wait: Whether to wait until they are ready; otherwise :meth:`WorkerGroup.begin` has them prepare
        themselves, and :meth:`WorkerGroup.ready` waits.
    :returns: A context manager that ends the workers.
    :raises PlacementError: There is no room for them.
    :raises WorkerFailedError: A worker could not come up.
    :raises WorkerDiedError: A worker process ended while it came up.
    :raises DeadlineError: They were not ready within ``placement.start_timeout_s``.
    """
    spec = LaunchSpec(
        config=config,
        backend=backend,
        worker_class=worker_class,
        role=role,
        num_workers=config.placement.train_workers if num_workers is None else num_workers,
        run_directory=run_directory.resolve(),
        env=worker_environment(config, backend, plugins, role),
        plugins=tuple(plugins.installed),
        collective=collective,
        first_device=first_device,
        devices=devices,
        seats=seats,
        extra_devices=extra_devices,
        reads=reads,
        options=options or {},
        computes=computes,
    )
    if computes and config.placement.launcher == "local":
        _warn_of_few_cores(spec.num_workers)
    group = WorkerGroup(make_launcher(config)(spec), spec)
    if wait:
        with on_failure(group.end):
            group.ready()
    return group


def worker_environment(
    config: Config, backend: BackendSpec, plugins: Plugins, role: str
) -> Mapping[str, str]:
    """Return variables to add to the environment of a role's workers."""
    ours = plugins.worker_env(
        backend,
        role=role,
        deterministic=config.run.deterministic,
        interface=config.cluster.interface,
        ip_version=config.cluster.ip_version,
        timeout_s=config.run.timeout_s,
        train_engine=config.train.engine,
    )
    interface = config.cluster.interface
    return {
        **(DETERMINISTIC_ENV if config.run.deterministic else {}),
        **({HOST_INTERFACE: interface} if interface else {}),
        **ours,
    }


def _warn_of_few_cores(num_workers: int) -> None:
    """Warn where the workers of this host are slow for want of processors, before they start."""
    cores = read_cpus().usable
    if num_workers > WORKERS_PER_CORE * cores:
        _log.warning(
            "%d workers share %g processors: their start takes minutes, and steps are slow. Lower "
            "placement.train_workers.",
            num_workers,
            cores,
        )


def make_launcher(config: Config) -> Callable[[LaunchSpec], Transport]:
    """Return the configured launcher of worker processes."""
    if config.placement.launcher == "local":
        from anygauge.runtime.launch_local import LocalTransport

        return LocalTransport
    set_ray_environment(config.cluster.address)
    from anygauge.runtime.launch_ray import RayTransport

    return RayTransport
