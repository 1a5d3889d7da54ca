"""Where the ranks of a group of workers meet: a key-value store on a free port of rank 0.

The port is chosen by the operating system while the socket is bound, and that same socket is handed to the
store, so no port is fixed and none can be taken by somebody else in between.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed

__all__ = ["LOOPBACK", "Address", "host_store", "join_store"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where rank 0 serves the store."""

    host: str
    port: int


def host_store(*, single_host: bool, timeout_s: float) -> TCPStore:
    """Serve the store from this process, for as long as the returned object lives.

    :param single_host: Listen on the loopback interface only.
    :param timeout_s: Longest wait of this process for a key, in seconds.
    :returns: The store; its ``port`` is what the other ranks need.
    """
    interface = LOOPBACK if single_host else ""
    listener = socket.create_server((interface, 0), backlog=4096)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(address: Address, *, timeout_s: float) -> TCPStore:
    """Connect to the store of rank 0.

    :param timeout_s: Longest wait for the connection and for a key, in seconds.
    """
    return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
