"""Buckets that servers map are in memory that their device calls shareable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.weight_sync.pusher import make_pusher
from anygauge_hooks.weights import WeightPeer, WeightTransportSpec


@pytest.mark.parametrize(
    ("shares", "server_tp", "place", "seen"),
    [(True, 1, "meta", ["in", "out"]), (False, 1, "meta", []), (True, 2, "cpu", [])],
)
def test_a_bucket_is_shareable_where_servers_map_it(
    shares: bool, server_tp: int, place: str, seen: list[str]
) -> None:
    """In host memory where a server has processes on several devices."""
    noted: list[str] = []

    @contextmanager
    def shareable() -> Iterator[None]:
        noted.append("in")
        yield
        noted.append("out")

    device = SimpleNamespace(type="meta", torch_device=torch.device("meta"), shareable=shareable)
    spec = WeightTransportSpec(
        name="t", make=lambda config, context: None, shares_buffers=shares, buffer_device=lambda _: "meta"
    )
    context: Any = SimpleNamespace(device=device, plugins=SimpleNamespace(get=lambda *names: spec))
    config: Any = SimpleNamespace(weight_sync=SimpleNamespace(transport="t"))
    peers = [WeightPeer(address="http://engine", tensor_parallel=server_tp)]
    bucket = make_pusher(config, context, peers)._buffers.take(8, 16)
    assert (bucket.device.type, bucket.dtype, bucket.numel(), noted) == (place, torch.uint8, 8, seen)
    assert bucket.is_shared() or place != "cpu"
