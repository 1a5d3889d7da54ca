"""Where the ranks of a group of workers meet: a key-value store on a free port of rank 0.

The port is chosen by the operating system while the socket is bound, and that same socket is handed to the
store, so no port is fixed and none can be taken by somebody else in between. On one host the store listens
on the loopback interface. On more, it listens on one address of its node and hears the run's nodes alone, and
every key has a secret in front that only the workers know.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not listed

from anygauge.distributed.admission import admit_only
from anygauge_hooks.errors import PlacementError

__all__ = ["host_store", "join_store", "keys_of"]

GREETING = "greeting"
"""A key that is there from the start, so that who joins knows whose store it is."""


def host_store(host: str, *, token: str, peers: Sequence[str], timeout_s: float) -> TCPStore:
    """Serve the store from this process, for as long as the returned object lives.

    :param host: Address to listen on.
    :param token: Secret of the group.
    :param peers: Addresses that may connect; where ``host`` is a loopback address, any process of the host.
    :param timeout_s: Longest wait of this process for a key, in seconds.
    :returns: The store; its ``port`` is what the other ranks need.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    listener = socket.create_server((host, 0), family=family, backlog=4096)
    if not address.is_loopback:
        admit_only(listener, peers)
    store = TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    keys_of(store, token).set(GREETING, "")
    return store


def join_store(host: str, port: int, *, token: str, timeout_s: float) -> TCPStore:
    """Connect to the store of rank 0.

    :param token: Secret of the group.
    :param timeout_s: Longest wait for the connection and for a key, in seconds.
    :raises PlacementError: It is not the store of this group.
    """
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    if not keys_of(store, token).check([GREETING]):
        raise PlacementError(
            f"The store at {host}:{port} is not that of this group of workers.",
            hint="Something else has taken its place on that host; start the run again.",
        )
    return store


def keys_of(store: TCPStore, token: str) -> PrefixStore:
    """Return the part of a store that belongs to a group of workers."""
    return PrefixStore(token, store)
