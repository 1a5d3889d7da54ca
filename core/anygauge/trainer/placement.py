"""Which resources a group of workers needs of a cluster, and whether it has them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge_hooks.errors import PlacementError

__all__ = [
    "bundle_of",
    "check_capacity",
    "placement_error",
    "rank_order",
]

Resources = Mapping[str, float]
RAY_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}
"""Actor options that are resources under another name."""


def bundle_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return what a worker reserves, as a Ray placement bundle.

    :param options: Ray actor options of a backend, such as ``{"num_gpus": 1}``.
    """
    bundle = {RAY_NAMES[key]: float(options[key]) for key in RAY_NAMES if options.get(key)}
    return bundle | {key: float(amount) for key, amount in options.get("resources", {}).items()}


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
