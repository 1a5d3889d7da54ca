"""Weights arrive as they are by each transport that needs no second process, from the device's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from anygauge.plugins import DEFAULT_PLUGINS, Plugins
from anygauge.testing.conformance.recipes import RECIPES, adjusted
from anygauge.weight_sync.buckets import unpack
from anygauge.weight_sync.pusher import make_pusher
from anygauge_hooks.types import BackendSpec, Device, WorkerContext
from anygauge_hooks.weights import (
    BroadcastGroup,
    WeightBucket,
    WeightPeer,
    WeightTarget,
    WeightTransportSpec,
    WeightUpdate,
)

pytestmark = pytest.mark.conformance

OF_THE_CORE = ("tensor", "disk")
"""Those of its transports that need one process alone; the others are tested without a backend."""
BUCKET = 1 << 12
SERVERS = 2


class Target(WeightTarget):
    """Keeps copies of what it is given, and the order of the calls."""

    def __init__(self, held: dict[str, Tensor], calls: list[str]) -> None:
        self._held, self._calls = held, calls

    def begin(self) -> None:
        self._calls.append("begin")

    def end(self) -> None:
        self._calls.append("end")

    def join_group(self, group: BroadcastGroup) -> None:
        self._calls.append("join")
        super().join_group(group)

    def load_memory(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        self._calls.append("load")
        self._held |= {name: tensor.clone() for name, tensor in unpack(bucket.tensors, bucket.data)}

    def load_directory(self, path: str, update: WeightUpdate) -> None:
        self._calls.append("load")
        for file in sorted(Path(path).glob("*.safetensors")):
            self._held |= load_file(file)


@dataclass(frozen=True, kw_only=True)
class Peer(WeightPeer):
    """A server in this process."""

    held: dict[str, Tensor] = field(default_factory=dict, compare=False)
    calls: list[str] = field(default_factory=list, compare=False)

    def target(self, *, deadline_s: float) -> WeightTarget:
        return Target(self.held, self.calls)


def installed_transports(plugins: Plugins) -> Iterator[WeightTransportSpec]:
    """Yield the transports of plugins outside the core."""
    for owner, spec in plugins.answers("register_weight_transports"):
        assert isinstance(spec, WeightTransportSpec)
        if owner not in DEFAULT_PLUGINS:
            yield spec


def weights(device: Device, version: int) -> Mapping[str, Tensor]:
    """Return weights of several types and layouts, larger and smaller than a bucket."""
    generator = torch.Generator().manual_seed(version)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device.torch_device)

    return {
        "matrix": random(40, 30).bfloat16(),
        "large": random(64, 64),
        "half": random(3, 5).half(),
        "one": random(1)[0],
        "odd": random(7).bfloat16()[1:],
        "view": random(8, 12)[2:6, 3:9],
        "transposed": random(12, 8).t(),
        "bytes": torch.arange(5, dtype=torch.uint8, device=device.torch_device),
        "whole": torch.arange(-3, 3, device=device.torch_device),
        "expanded": random(1, 6).expand(4, 6),
    }


@pytest.fixture(params=[*OF_THE_CORE, "installed"])
def names(request: pytest.FixtureRequest, plugins: Plugins) -> list[str]:
    if request.param != "installed":
        return [request.param]
    return [spec.name for spec in installed_transports(plugins)]


def test_facts_of_a_transport_fit_each_other(plugins: Plugins, backend: BackendSpec, device: Device) -> None:
    context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    for spec in installed_transports(plugins):
        assert spec.same_device or spec.other_device, f"{spec.name} reaches no server"
        if spec.buffer_device is not None:
            place = spec.buffer_device(context)
            assert isinstance(place, str)
            assert torch.device(place).type in ("cpu", device.type)


def test_weights_arrive_as_they_are(
    names: list[str], plugins: Plugins, backend: BackendSpec, device: Device, tmp_path: Path
) -> None:
    for name in names:
        tables: Any = {
            **RECIPES["served"],
            "run": {"directory": str(tmp_path)},
            "weight_sync": {"transport": name, "bucket_bytes": BUCKET},
        }
        context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
        pusher = make_pusher(adjusted(tables, backend, plugins), context)
        peers = [Peer(address=f"http://127.0.0.1:{port + 1}", device=device.type) for port in range(SERVERS)]
        for version in (1, 2):
            sent = weights(device, version)
            report = pusher.push(iter(sent.items()), version, peers)
            if any("join" in peer.calls for peer in peers):
                break  # a broadcast needs a second process
            assert [(peer.state, peer.version) for peer in report.peers] == [("serving", version)] * SERVERS
            assert report.tensors == len(sent)
            assert report.bytes == sum(tensor.nbytes for tensor in sent.values())
            for peer in peers:
                assert_equal(peer.held, sent)
                peer.held.clear()
        pusher.close()


def assert_equal(held: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    assert set(held) == set(sent)
    for name, tensor in sent.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name].cpu(), tensor.cpu()), name
