"""Placement: resources that a group of workers needs, and whether the cluster has them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anygauge_hooks.errors import PlacementError

__all__ = [
    "DETECTED_BY_RAY",
    "GPU",
    "Seat",
    "actor_options",
    "check_capacity",
    "placement_error",
    "rank_order",
    "shared_seats",
]

Resources = Mapping[str, float]
GPU = "GPU"
"""Resource that Ray has options of its own for."""
DETECTED_BY_RAY = frozenset({GPU, "FURIOSA", "HPU", "MBLT", "NPU", "RBLN", "TPU", "TTNPU", "neuron_cores"})
"""Resources that Ray counts on each node by itself; others exist only where somebody declares them."""


def actor_options(bundle: Resources) -> dict[str, Any]:
    """Return the options of a Ray actor that reserves a bundle, and no core.

    Ray takes GPUs by an option of their own, and refuses them among the other resources.
    """
    custom = {name: amount for name, amount in bundle.items() if name != GPU}
    return {"num_cpus": 0, "num_gpus": bundle.get(GPU, 0), "resources": custom}


def rank_order(bundle_nodes: Mapping[int, str]) -> list[int]:
    """Return placement bundles in the order of ranks, so that neighbors share a node.

    :param bundle_nodes: The node of each bundle.
    """
    nodes = list(dict.fromkeys(bundle_nodes[index] for index in sorted(bundle_nodes)))
    return sorted(bundle_nodes, key=lambda index: (nodes.index(bundle_nodes[index]), index))


class Seat(NamedTuple):
    """Placement of a worker on devices of other workers."""

    node: str
    accelerators: Sequence[str]
    """Physical ids."""


def shared_seats(workers: Sequence[tuple[str, Sequence[str]]], count: int, devices: int) -> list[Seat]:
    """Return places on the devices of workers that have one each, in the order of ranks.

    :param workers: Node and device of each.
    :param devices: Number of devices for each place.
    :raises PlacementError: Those of one are on more than one node.
    """
    return [_seat(workers[first : first + devices]) for first in range(0, count * devices, devices)]


def _seat(workers: Sequence[tuple[str, Sequence[str]]]) -> Seat:
    nodes = list(dict.fromkeys(node for node, _ in workers))
    if len(nodes) > 1:
        raise PlacementError(
            f"A rollout engine of {len(workers)} devices would use those of training workers on several "
            f"nodes: {', '.join(nodes)}.",
            hint="Give each node a multiple of as many training workers, or leave out placement.colocated.",
        )
    return Seat(nodes[0], tuple(device for _, own in workers for device in own))


def check_capacity(bundle: Resources, count: int, totals: Mapping[str, Resources]) -> None:
    """Check that a cluster that does not grow could ever hold the workers.

    :param totals: All resources of each node, used or not.
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
    """Return the error that lists the requested resources and each node's.

    :param why: As a clause.
    """
    nodes = [f"  node {name}: {_amounts(bundle, there)}" for name, there in sorted(available.items())]
    requested = f"{count} x {{{', '.join(f'{key}: {amount:g}' for key, amount in bundle.items())}}}"
    lines = [f"{why}: requested {requested}, available:", *(nodes or ["  no node"])]
    return PlacementError("\n".join(lines), hint=_hint(bundle))


def _amounts(bundle: Resources, there: Resources) -> str:
    return ", ".join(f"{key}: {there.get(key, 0.0):g}" for key in bundle)


def _hint(bundle: Resources) -> str:
    custom = [key for key in bundle if key != GPU]
    declare = "".join(f" or start the nodes with --resources='{{\"{key}\": 8}}'" for key in custom)
    return f"Lower placement.train_workers, wait for other jobs to end{declare}."
