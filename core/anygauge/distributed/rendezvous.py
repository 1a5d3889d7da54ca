"""Rendezvous of a group of workers: a key-value store on a free port of rank 0.

The port is chosen by the operating system while the socket is bound, and that same socket is handed to the
server, so no port is fixed and none can be taken by somebody else in between. On one host the store listens
on the loopback interface. On more, it listens on one address of its node and hears the run's nodes alone.
Everywhere it answers those alone that prove to know the secret that the driver gives to the workers.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from anygauge.distributed.admission import admit_only
from anygauge.distributed.authenticated_store import AuthenticatedStore
from anygauge.distributed.store_server import StoreServer

__all__ = ["host_store", "join_store"]


def host_store(host: str, *, token: str, peers: Sequence[str], timeout_s: float) -> AuthenticatedStore:
    """Serve the store from this process, until it is closed or the process ends.

    :param host: Address to listen on.
    :param token: Secret of the group.
    :param peers: Addresses that may connect; where ``host`` is a loopback address, any process of the host.
    :param timeout_s: Longest wait of this process for a key, in seconds.
    :returns: The store; its ``port`` is what the other ranks need.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    listener = socket.create_server((host, 0), family=family)
    if not address.is_loopback:
        admit_only(listener, peers)
    port = int(listener.getsockname()[1])
    server = StoreServer(listener, token.encode())
    return AuthenticatedStore(host, port, token.encode(), timeout_s=timeout_s, server=server)


def join_store(host: str, port: int, *, token: str, timeout_s: float) -> AuthenticatedStore:
    """Connect to the store of rank 0.

    :param token: Secret of the group.
    :param timeout_s: Longest wait for the connection and for a key, in seconds.
    :raises PlacementError: It is not the store of this group, or cannot be reached.
    """
    return AuthenticatedStore(host, port, token.encode(), timeout_s=timeout_s)
