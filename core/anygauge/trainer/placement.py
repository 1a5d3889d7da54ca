"""Which processes a run gets, and where: from the config and the backend to a running group of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anygauge.config.schema import Config
from anygauge.plugins import Plugins
from anygauge.trainer.signals import terminate_as_exception
from anygauge.trainer.worker_group import LaunchSpec, Transport, WorkerGroup
from anygauge_hooks.errors import PlacementError
from anygauge_hooks.types import BackendSpec

__all__ = [
    "WorkerGroup",
    "bundle_of",
    "check_capacity",
    "host_slots",
    "launch_workers",
    "make_launcher",
    "placement_error",
    "rank_order",
    "terminate_as_exception",
]

Resources = Mapping[str, float]
RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}
"""Actor options that are resources under another name."""


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


def bundle_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return what a worker reserves, as a Ray placement bundle.

    :param options: Ray actor options of a backend, such as ``{"num_gpus": 1}``.
    """
    bundle = {RAY_NAMES[key]: float(options[key]) for key in RAY_NAMES if options.get(key)}
    return bundle | {key: float(amount) for key, amount in options.get("resources", {}).items()}


def host_slots(backend: BackendSpec, num_workers: int) -> dict[str, float]:
    """Return the custom resources that a Ray cluster of our own must declare to hold workers of the host.

    Accelerators are counted by Ray. Worker slots on the host are not hardware: there are as many as are asked
    for, since workers that took cores would wait for ever, in silence, where there are fewer cores.

    :param num_workers: How many workers must fit.
    """
    if backend.device_type != "cpu":
        return {}
    return {key: amount * num_workers for key, amount in backend.ray_options(1).get("resources", {}).items()}


def rank_order(bundle_nodes: Mapping[int, str]) -> list[int]:
    """Return placement bundles in the order of ranks, so that neighbours share a node.

    :param bundle_nodes: The node of each bundle.
    """
    nodes = list(dict.fromkeys(bundle_nodes[index] for index in sorted(bundle_nodes)))
    return sorted(bundle_nodes, key=lambda index: (nodes.index(bundle_nodes[index]), index))


def check_capacity(bundle: Resources, count: int, totals: Mapping[str, Resources]) -> None:
    """Check that a cluster that does not grow could ever hold the workers.

    :param totals: What each node has, used or not.
    :raises PlacementError: It could not.
    """
    room = sum(
        min((int(total.get(key, 0.0) // amount) for key, amount in bundle.items()), default=count)
        for total in totals.values()
    )
    if room < count:
        raise placement_error(bundle, count, totals, "The cluster is too small")


def placement_error(
    bundle: Resources, count: int, available: Mapping[str, Resources], why: str
) -> PlacementError:
    """Return the error that tells what was requested and what each node has.

    :param why: As a clause.
    """
    nodes = [f"  node {name}: {_amounts(bundle, there)}" for name, there in sorted(available.items())]
    requested = f"{count} x {{{', '.join(f'{key}: {amount:g}' for key, amount in bundle.items())}}}"
    lines = [f"{why}: requested {requested}, available:", *(nodes or ["  no node"])]
    return PlacementError("\n".join(lines), hint=_hint(bundle))


def _amounts(bundle: Resources, there: Resources) -> str:
    return ", ".join(f"{key}: {there.get(key, 0.0):g}" for key in bundle)


def _hint(bundle: Resources) -> str:
    custom = [key for key in bundle if key not in RAY_NAMES.values()]
    declare = "".join(f" or start the nodes with --resources='{{\"{key}\": 8}}'" for key in custom)
    return f"Lower placement.num_workers, wait for other jobs to end{declare}."
