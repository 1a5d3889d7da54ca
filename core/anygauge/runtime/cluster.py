"""Consistency checks of a run's nodes, and the rendezvous of its workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from anygauge.config.rules.algorithm import compares
from anygauge.config.schema import Cluster, Config
from anygauge.plugins import BACKENDS_GROUP, PLUGINS_GROUP
from anygauge_hooks import PROJECT
from anygauge_hooks.errors import PlacementError

__all__ = [
    "ClusterNode",
    "GroupRendezvous",
    "NodeFacts",
    "address_of",
    "check_nodes",
    "host_addresses",
    "is_one_plain_host",
    "make_rendezvous",
    "marker_file",
    "model_paths",
    "node_facts",
    "saves",
]

LOOPBACK = {"any": "127.0.0.1", "4": "127.0.0.1", "6": "::1"}
"""Loopback addresses by ``cluster.ip_version``."""
MARKER_WAIT_S = 2.0
"""For a file to appear on another node; network file systems keep what they know for a moment."""

Addresses = Mapping[str, Sequence[str]]
"""Addresses by network interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Packages, addresses and paths of one node."""

    packages: Mapping[str, str]
    """Versions by name; Python is one of them."""
    addresses: Addresses
    missing: Sequence[str] = ()
    """Requested paths that do not exist."""
    sees_marker: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node as Ray knows it."""

    name: str
    """For people: host and address."""
    ip: str
    facts: NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRendezvous:
    """Rendezvous of a group's ranks, and the token that admits them."""

    host: str
    """Address that rank 0 listens on."""
    peers: Sequence[str]
    """Every address of every node."""
    token: str = field(repr=False)
    """Secret of the group."""
    single_host: bool


def is_one_plain_host(cluster: Cluster, nodes: Sequence[str], driver_node: str) -> bool:
    """Return whether there is nothing to compare and no address to choose."""
    return set(nodes) == {driver_node} and cluster.interface is None and cluster.ip_version == "any"


# -------------------------------------------------------------------------
# On a node
# -------------------------------------------------------------------------


def node_facts(paths: Sequence[str] = (), marker: str | None = None) -> NodeFacts:
    """Return the facts of this node.

    :param paths: Directories that a run needs here.
    :param marker: A file that the driver has just written.
    """
    return NodeFacts(
        packages=_package_versions(),
        addresses=host_addresses(),
        missing=tuple(path for path in paths if not Path(path).exists()),
        sees_marker=marker is None or _appears(Path(marker)),
    )


def _package_versions() -> dict[str, str]:
    """Return the versions of Python, of this project, of its plugins, and of what they require directly."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    owners = [distribution(PROJECT)]
    for group in (BACKENDS_GROUP, PLUGINS_GROUP):
        owners += [entry.dist for entry in entry_points(group=group) if entry.dist is not None]
    versions = {"Python": python} | {owner.name: owner.version for owner in owners}
    for name in {name for owner in owners for name in _required(owner)}:
        try:
            versions[name] = distribution(name).version
        except PackageNotFoundError:
            continue
    return versions


def _required(owner: Distribution) -> Iterator[str]:
    for text in owner.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def host_addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses of this host; those that are valid on one link alone are left out."""
    addresses = {}
    for name, entries in psutil.net_if_addrs().items():
        texts = [entry.address for entry in entries if entry.family.name in ("AF_INET", "AF_INET6")]
        addresses[name] = tuple(text for text in texts if not ip_address(text).is_link_local)
    return addresses


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + MARKER_WAIT_S
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


# -------------------------------------------------------------------------
# On the driver
# -------------------------------------------------------------------------


def saves(config: Config) -> bool:
    """Return whether the workers that train write into the run directory."""
    save = config.save
    asked = save.every is not None or save.hf_every is not None or save.hf_at_end
    return (asked or config.debug.dump_batches) and config.debug.mode != "rollout_only"


def model_paths(config: Config) -> list[str]:
    """Return the directories that each worker reads, as far as the driver has them itself."""
    paths = [config.model.path, config.teacher.path, config.critic.path, config.train.lora.path]
    if compares(config):
        paths.append(config.reference.path)
    return [str(path.absolute()) for path in paths if path is not None and path.exists()]


@contextmanager
def marker_file(directory: Path) -> Iterator[str]:
    """Write a file to test whether nodes share a directory, and remove it at the end."""
    marker = directory / f".shared-{token_hex(8)}"
    marker.touch()
    try:
        yield str(marker)
    finally:
        marker.unlink(missing_ok=True)


def check_nodes(cluster: Cluster, driver: NodeFacts, places: Sequence[ClusterNode], directory: Path) -> None:
    """Check that a run can go on over these nodes; all that is wrong is reported together.

    :param directory: The run directory.
    :raises PlacementError: They differ from the driver's node, or lack what the run needs.
    """
    problems, without_address = [], []
    for place in places:
        if cluster.check_packages:
            problems += [
                f"{place.name}: {text}" for text in _differences(driver.packages, place.facts.packages)
            ]
        problems += [f"{place.name}: no {path}" for path in place.facts.missing]
        if not place.facts.sees_marker:
            problems.append(f"{place.name}: does not see what the driver writes into {directory}")
        if not _candidates(place.facts.addresses, cluster):
            without_address.append(f"{place.name}: {_no_address(place.facts.addresses, cluster)}")
    if problems or without_address:
        lines = dict.fromkeys([*problems, *without_address])
        hints = [*([_HINT] if problems else []), *([_ADDRESS_HINT] if without_address else [])]
        raise PlacementError("\n  ".join(["The nodes do not match:", *lines]), hint=" ".join(hints))


_HINT = (
    "Install the same packages on every node (cluster.check_packages = false skips this); keep models and "
    "the run directory on a file system that all nodes share, or save and dump nothing."
)

_ADDRESS_HINT = (
    "Set cluster.interface and cluster.ip_version to what every node has, or leave the choice to the "
    'libraries: cluster.interface = "none".'
)


def _differences(wanted: Mapping[str, str], actual: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(wanted.keys() | actual.keys(), key=str.lower):
        here, there = wanted.get(name), actual.get(name)
        if _public(here) != _public(there):
            yield f"{name} {there or 'is not installed'}, but {here or 'not installed'} on the driver's node"


def _public(version: str | None) -> str | None:
    """Return a version without its local label: a driver may well have torch for CPUs."""
    return None if version is None else Version(version).public


def _no_address(addresses: Addresses, cluster: Cluster) -> str:
    there = "; ".join(f"{name}: {', '.join(texts) or 'no address'}" for name, texts in addresses.items())
    version = "" if cluster.ip_version == "any" else f"IPv{cluster.ip_version} "
    where = f"on interface {cluster.interface!r}" if cluster.interface else "on any interface"
    return f"no {version}address {where}; it has {there}"


def make_rendezvous(cluster: Cluster, nodes: Sequence[str], places: Sequence[ClusterNode]) -> GroupRendezvous:
    """Return where the ranks of a group meet.

    :param nodes: The node of each rank.
    :param places: The nodes, rank 0's first; empty on one plain host.
    """
    single_host = len(set(nodes)) == 1
    host = LOOPBACK["any"]
    if places:
        host = address_of(places[0].facts.addresses, cluster, single_host=single_host, known=places[0].ip)
    peers = {text for place in places for texts in place.facts.addresses.values() for text in texts}
    return GroupRendezvous(host=host, peers=sorted(peers), token=token_hex(16), single_host=single_host)


def address_of(addresses: Addresses, cluster: Cluster, *, single_host: bool, known: str = "") -> str:
    """Return the address that a node is reached at.

    :param single_host: Nobody but this host needs to reach it.
    :param known: The address that Ray knows, taken where it fits.
    """
    candidates = _candidates(addresses, cluster)
    if single_host and cluster.interface is None:
        return LOOPBACK[cluster.ip_version]
    return known if known in candidates else min(candidates, key=lambda text: ip_address(text).is_loopback)


def _candidates(addresses: Addresses, cluster: Cluster) -> list[str]:
    return [
        text
        for name, texts in addresses.items()
        for text in texts
        if cluster.interface in (None, name) and cluster.ip_version in ("any", str(ip_address(text).version))
    ]
