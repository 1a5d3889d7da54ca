"""Confirm that the connections of gloo lead to ranks of this run.

Gloo authenticates nobody: whoever connects to the port of a rank before another rank does, and sends a small
number, takes its place. But no two connections have the same pair of endpoints, and the ranks share a store
that strangers cannot write. So each rank publishes the endpoints of its connections there, once groups are
made. A rank with an accepted connection that no rank has made ends the run, before anything goes over it.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store  # type: ignore[attr-defined]  # not listed

from anygauge.distributed.addresses import in_url
from anygauge_hooks.errors import AnygaugeError, PlacementError

__all__ = ["Connections"]

SHOWN = 5
"""Connections that an error names."""
Endpoint = tuple[str, int]


class Connections:
    """The connections of one rank, and those that the other ranks have published.

    :param store: That all ranks share, and nobody else.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._rounds = itertools.count()

    @contextmanager
    def confirmed(self) -> Iterator[None]:
        """Make groups inside; at the end, confirm what connected to them. A collective of all ranks.

        :raises PlacementError: They could not be made, or something that is no rank has connected.
        """
        if self._world_size == 1:
            yield
            return
        before = set(_listening())
        try:
            yield
        except AnygaugeError:
            raise
        except RuntimeError as error:
            raise PlacementError(
                f"The ranks could not connect to each other: {error}",
                hint="A rank has ended, cannot be reached, or its port is kept busy by something else. See "
                "docs/clusters.md for the addresses that ranks use.",
            ) from error
        self._confirm({endpoint for endpoint in _listening() if endpoint not in before})

    def _confirm(self, listeners: set[Endpoint]) -> None:
        key, connections = f"connections/{next(self._rounds)}", list(_connected())
        self._store.set(f"{key}/{self._rank}", json.dumps(connections))
        published = [self._store.get(f"{key}/{rank}") for rank in range(self._world_size)]
        known = {(tuple(ours), tuple(theirs)) for part in published for ours, theirs in json.loads(part)}
        strangers = [
            f"{_shown(theirs)} to {_shown(ours)}"
            for ours, theirs in connections
            if ours in listeners and (theirs, ours) not in known
        ]
        if strangers:
            raise PlacementError(
                f"Something that is no rank has connected to the collectives of rank {self._rank}: "
                f"{', '.join(strangers[:SHOWN])}{', ...' if len(strangers) > SHOWN else ''}.",
                hint="Nothing was exchanged with it. Start the run again; if it happens again, find what "
                "scans the ports of this host, or what translates addresses between the nodes.",
            )


def _listening() -> Iterator[Endpoint]:
    """Yield the endpoints that this process listens on."""
    for each in _tcp_sockets():
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield _endpoint(each.getsockname())


def _connected() -> Iterator[tuple[Endpoint, Endpoint]]:
    """Yield the own and the other endpoint of each connection of this process."""
    for each in _tcp_sockets():
        with suppress(OSError):  # it listens, or the other end has gone
            yield _endpoint(each.getsockname()), _endpoint(each.getpeername())


def _tcp_sockets() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                        yield found


def _endpoint(address: tuple[str, int]) -> Endpoint:
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), address[1]


def _shown(endpoint: Endpoint) -> str:
    return f"{in_url(endpoint[0])}:{endpoint[1]}"
