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
def test_a_group_of_the_host_does_one_collective_at_a_time(address: str | None, reloadable: bool) -> None:
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
        for group in (dist.group.WORLD, dist.new_group([0])):
            assert group._get_backend(HOST).options._threads == 1
    finally:
        destroy_process_group()
