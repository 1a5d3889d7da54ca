"""From the config and the backend to a running group of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from anygauge.config.schema import Config
from anygauge.plugins import Plugins
from anygauge.trainer.worker_group import LaunchSpec, Transport, WorkerGroup
from anygauge_hooks.types import BackendSpec

__all__ = ["launch_workers", "make_launcher"]


def launch_workers(
    config: Config,
    backend: BackendSpec,
    plugins: Plugins,
    *,
    worker_class: str,
    role: str,
    run_directory: Path,
    num_workers: int | None = None,
) -> WorkerGroup:
    """Start the workers of a role and return them ready for calls.

    :param worker_class: ``"package.module:Class"``, called in each worker with the config and a
        ``WorkerContext``.
    :param role: Names the workers in errors and logs, and decides their environment.
    :param run_directory: Gets ``logs/<role>-<rank>.log``.
    :param num_workers: ``None`` takes ``placement.num_workers``.
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
        num_workers=config.placement.num_workers if num_workers is None else num_workers,
        run_directory=run_directory.resolve(),
        env=plugins.merged("worker_env", backend=backend, role=role),
        plugins=tuple(plugins.installed),
    )
    group = WorkerGroup(make_launcher(config.placement.launcher)(spec), spec)
    try:
        group.start()
    except BaseException:
        group.end()
        raise
    return group


def make_launcher(name: str) -> Callable[[LaunchSpec], Transport]:
    """Return what starts worker processes.

    :param name: ``"ray"`` or ``"local"``.
    """
    if name == "local":
        from anygauge.trainer.launch_local import LocalTransport

        return LocalTransport
    from anygauge.trainer.launch_ray import RayTransport

    return RayTransport
