"""The default process group of a worker."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]  # not listed

from anygauge.plugins import Plugins
from anygauge_hooks.types import BackendSpec

__all__ = ["destroy_process_group", "init_process_group"]

LOOPBACK_INTERFACE = "lo"
HOST_BACKEND = "gloo"
BOUND_HOST_BACKEND = "gloo_bound"
"""The host backend on an address that we choose; by itself it takes the first of an interface."""


def init_process_group(
    plugins: Plugins,
    backend: BackendSpec,
    store: Store,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    single_host: bool,
    address: str | None = None,
) -> None:
    """Initialise the default process group. A collective: returns when every rank has come.

    :param plugins: Asked for the group's options (``make_process_group_options``).
    :param store: Shared by all ranks.
    :param timeout_s: Seconds until a collective of the group fails.
    :param single_host: Keep host-side traffic on the loopback interface.
    :param address: Of this host, for collectives of the host backend; ``None`` lets it choose.
    """
    if single_host:
        # Otherwise gloo resolves the host's name, which fails or picks a dead interface on many laptops.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    options = plugins.first(
        "make_process_group_options", backend=backend, group_name="default", timeout_s=timeout_s
    )
    name = backend.dist_backend
    if address is not None and name == HOST_BACKEND:
        name = _bind_host_backend(address)
    torch.distributed.init_process_group(
        name,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=options,
    )


def _bind_host_backend(address: str) -> str:
    """Register the host backend on an address, and return the name to ask for it."""
    torch.distributed.Backend.register_backend(
        BOUND_HOST_BACKEND, partial(_host_group, address), devices=["cpu"]
    )
    return BOUND_HOST_BACKEND


def _host_group(address: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo  # its type stub has another constructor
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def destroy_process_group() -> None:
    """Destroy every process group of this process, if there are any."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
