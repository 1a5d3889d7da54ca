"""The groups that a worker makes, in a world of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from anygauge.distributed.process_groups import destroy_process_group, init_process_group
from anygauge.plugins import load_plugins

HOST = torch.device("cpu")


@pytest.mark.parametrize("reloadable", [False, True])
@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_groups_of_the_host_share_devices_and_do_one_collective_at_a_time(
    address: str | None, reloadable: bool
) -> None:
    """With two threads torch 2.13 breaks the heap: within seconds, where gathers are always under way."""
    plugins = load_plugins()
    init_process_group(
        plugins,
        plugins.get("register_backends", "cpu"),
        dist.HashStore(),
        rank=0,
        world_size=1,
        timeout_s=30.0,
        single_host=True,
        address=address,
        reloadable=reloadable,
    )
    try:
        groups = (dist.group.WORLD, dist.new_group([0]))
        one, two = (group._get_backend(HOST).options for group in groups)
        assert one._threads == two._threads == 1
        assert one._devices[0] is two._devices[0]
    finally:
        destroy_process_group()
