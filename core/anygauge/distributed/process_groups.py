"""The default process group of a worker."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed

from anygauge.plugins import Plugins
from anygauge_hooks.types import BackendSpec

__all__ = ["destroy_process_group", "init_process_group"]

LOOPBACK_INTERFACE = "lo"


def init_process_group(
    plugins: Plugins,
    backend: BackendSpec,
    store: TCPStore,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    single_host: bool,
) -> None:
    """Initialise the default process group. A collective: returns when every rank has come.

    :param plugins: Asked for the group's options (``make_process_group_options``).
    :param store: Shared by all ranks.
    :param timeout_s: Seconds until a collective of the group fails.
    :param single_host: Keep host-side traffic on the loopback interface.
    """
    if single_host:
        # Otherwise gloo resolves the host's name, which fails or picks a dead interface on many laptops.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    options = plugins.first(
        "make_process_group_options", backend=backend, group_name="default", timeout_s=timeout_s
    )
    torch.distributed.init_process_group(
        backend.dist_backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=options,
    )


def destroy_process_group() -> None:
    """Destroy every process group of this process, if there are any."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
