"""Broadcast group of a training rank and the servers' processes, separate from the trainer's groups.

The server makes its side with torch's private helper, so the store and its prefixes must be those that the
helper makes of an address and a name.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch.distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not listed
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Membership", "Rendezvous", "address_toward", "finish", "join_group"]


class Rendezvous:
    """The store of a group, served from this process on a free port."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        version = ipaddress.ip_address(host).version
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        listener = socket.create_server((host, 0), family=family)
        self.host = host
        self.port = int(listener.getsockname()[1])
        self.store = TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class Membership:
    """One process's part in a group whose rank 0 sends."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)

    def start(self, tensor: Tensor) -> None:
        """Broadcast a tensor on rank 0; receive it on other ranks.

        On an accelerator it is under way when this returns, and what the device is asked to do from then on
        comes after it, such as to write to the tensor; :func:`finish` waits for it here.

        :raises RuntimeError: A process has left the group, or takes longer than the group's time.
        """
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        assert self._group is not None, "the group was left"
        self._group.broadcast([tensor], options).wait()

    def close(self, *, broken: bool = False) -> None:
        """Leave the group, so that collectives of the others fail.

        :param broken: End what this process has under way in it, too: where a device does that, leaving waits
            for it.
        """
        group, self._group = self._group, None
        if group not in c10d._world.pg_map:
            return
        if broken:
            with suppress(RuntimeError):  # not every library can
                c10d._abort_process_group(group)
                return
        torch.distributed.destroy_process_group(group)


def finish(device: torch.device) -> None:
    """Wait for broadcasts that were started on a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def join_group(
    host: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float,
    store: Store | None = None,
) -> Membership:
    """Join a group and return once every process has.

    :param store: Store that this process serves, on rank 0.
    :raises RuntimeError: Another does not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    helper: Any = c10d._new_process_group_helper  # what the server uses; the public function needs its ranks
    group, _ = helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return Membership(group, timeout_s)


def address_toward(address: str) -> str:
    """Return the address of this host that a server sees.

    :param address: Address of the server: ``http://host:port``.
    """
    parts = urlsplit(address)
    assert parts.hostname is not None, address
    target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        probe.connect(target[4])  # sends nothing
        return str(probe.getsockname()[0])
