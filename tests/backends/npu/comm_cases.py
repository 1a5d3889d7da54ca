"""Rank programs for the tests of devices and communication."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from anygauge.config import Config
from anygauge.config.schema import WeightSync
from anygauge.device import memory_phase
from anygauge.weight_sync.broadcast import Rendezvous, finish, join_group
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.plugin import register_weight_transports
from anygauge.weight_sync.pusher import WeightPusher
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import OutOfMemoryError
from anygauge_tests.fake_engine import FakeServer, Options
from anygauge_tests.http_requests import ask

LIMIT_S = 60.0


def device(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Return how operators are chosen, what the optimizer is, and what is said of too little memory."""
    npu: Any = vars(torch)["npu"]
    weight = torch.nn.Parameter(torch.ones(3, device=context.device.torch_device))
    weight.grad = torch.ones_like(weight)
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    groups = [{"params": [weight]}]
    made = context.plugins.first("make_optimizer", backend=context.backend, param_groups=groups, **settings)
    made.step()
    try:
        with memory_phase(context.device, "load"):
            torch.empty(1 << 50, dtype=torch.uint8, device=context.device.torch_device)
        full = ""
    except OutOfMemoryError as error:
        full = str(error)
    return {
        "hf32": (npu.matmul.allow_hf32, npu.conv.allow_hf32),
        "compiles": not npu.is_jit_compile_false(),
        "fused": made.defaults["fused"],
        "state": {name: str(value.device) for name, value in made.state[weight].items()},
        "full": full,
        "pinned": torch.ones(3).pin_memory().is_pinned(),
        "accelerator": str(torch.accelerator.current_accelerator()),
    }


def options(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Return what the default group was made with, and what a group like Megatron's was."""
    found = {}
    other = dist.new_group(timeout=timedelta(seconds=LIMIT_S / 2))
    for name, group in (("default", dist.group.WORLD), ("other", other)):
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
    group.start(data)
    finish(data.device)
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
            report = pusher.push(weights(version, place).items(), version, [server.peer()])
            assert not report.failed, report
            answer = ask(f"{server.address}/weights_checker").json()
            found[version] = answer["ranks"][0]["checksums"]
        pusher.close()
    return found


def weights(version: int, place: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    whole = {f"layers.{layer}.weight": torch.randn(24, 32, generator=generator) for layer in range(4)}
    whole["norm.weight"] = torch.randn(7, generator=generator).bfloat16()
    return {name: tensor.to(place) for name, tensor in whole.items()}
