"""What a rank does for the tests of communication."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest.mock import patch

import httpx2
import torch
import torch.distributed as dist

from anygauge.config import Config
from anygauge.config.schema import WeightSync
from anygauge.testing.fake_engine import FakeServer, Options
from anygauge.weight_sync.broadcast import Rendezvous, join_group
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.plugin import register_weight_transports
from anygauge.weight_sync.pusher import WeightPusher
from anygauge_hooks.engines import WorkerContext

LIMIT_S = 60.0


def options(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Return what the default group was made with, and what a group beside it was."""
    found = {}
    for name, group in (("default", dist.group.WORLD), ("other", dist.new_group())):
        assert group is not None
        dist.barrier(group)
        own: Any = group._get_backend(context.device.torch_device).options
        found[name] = {
            "class": f"{type(own).__module__}.{type(own).__qualname__}",
            "config": dict(own.hccl_config),
            "timeout_s": own._timeout.total_seconds(),
        }
    return found


def ipv6(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Form a group as a trainer and a server do, at an address of IPv6, and return what arrives."""
    rendezvous = Rendezvous("::1", timeout_s=LIMIT_S) if context.rank == 0 else None
    sent = [rendezvous.port if rendezvous else None]
    dist.broadcast_object_list(sent, 0)
    group = join_group(
        "::1",
        int(sent[0] or 0),
        rank=context.rank,
        world_size=context.world_size,
        name="over-ipv6",
        backend=context.backend.dist_backend,
        timeout_s=LIMIT_S,
        store=rendezvous.store if rendezvous else None,
    )
    data = torch.arange(5.0, device=context.device.torch_device) * (1 - context.rank)
    if context.rank == 0:
        group.send(data)
    else:
        group.receive(data)
    group.close()
    return data


def push(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Push weights to a server on the second device; return what it holds after each version."""
    make = {spec.name: spec.make for spec in register_weight_transports()}["distributed"]
    place = context.device.torch_device
    visible = context.backend.visible_devices_env
    alone = {visible: "1"} if visible else {}
    settings = WeightSync(transport="distributed", bucket_bytes=4096, verify="always")
    buffers = Buffers(partial(torch.empty, dtype=torch.uint8, device=place))
    pusher = WeightPusher(settings, make(config, context), buffers)
    found = {}
    with patch.dict(os.environ, alone), FakeServer(Options(device=place.type)) as server:
        for version in (1, 2):
            report = pusher.push(weights(version, place).items(), version, [server.weight_peer()])
            assert not report.failed, report
            answer = httpx2.get(f"{server.address}/weights_checker", trust_env=False).json()
            found[version] = answer["ranks"][0]["checksums"]
        pusher.close()
    return found


def weights(version: int, place: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    whole = {f"layers.{layer}.weight": torch.randn(24, 32, generator=generator) for layer in range(4)}
    whole["norm.weight"] = torch.randn(7, generator=generator).bfloat16()
    return {name: tensor.to(place) for name, tensor in whole.items()}
