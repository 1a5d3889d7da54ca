"""Only changes travel, through a receiver beside each server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.config.schema import WeightSync
from anygauge.plugins import load_plugins
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.weight_sync import receiver as receiving
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.changes import Change
from anygauge.weight_sync.checksum import checksum
from anygauge.weight_sync.pusher import WeightPusher
from anygauge.weight_sync.receiver import Receiver
from anygauge.weight_sync.transports.delta import DeltaTransport
from anygauge_hooks.sglang import WeightApi
from anygauge_tests.fake_engine import FakeServer
from anygauge_tests.http_requests import ask

API = WeightApi(checksums="sha256")


@pytest.fixture
def receiver(server: FakeServer) -> Iterator[Receiver]:
    peer = SGLangPeer(address=server.address)
    running = Receiver(peer, host="127.0.0.1", bucket_bytes=1 << 16, deadline_s=20)
    yield running
    running.close()


@pytest.fixture
def pusher() -> Iterator[WeightPusher]:
    options = WeightSync(transport="delta", bucket_bytes=1 << 16, verify="always", deadline_s=20)
    made = WeightPusher(
        options, DeltaTransport(deadline_s=20), Buffers(partial(torch.empty, dtype=torch.uint8))
    )
    yield made
    made.close()


def peer(server: FakeServer, receiver: Receiver, **more: Any) -> SGLangPeer:
    return SGLangPeer(
        address=server.address, receiver=receiver.address, secret=receiver.secret, api=API, **more
    )


def first_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {
        f"model.layers.{layer}.mlp.down_proj.weight": torch.randn(64, 128, generator=generator)
        for layer in range(6)
    }
    return found | {"model.norm.weight": torch.ones(9).bfloat16(), "model.scale": torch.tensor(1.0)}


def changed_rows(weights: dict[str, Tensor]) -> int:
    """Change some rows of one tensor, and return how many bytes that are."""
    tensor = weights["model.layers.3.mlp.down_proj.weight"]
    tensor[8:24] = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    return 16 * 128 * 4


def held(server: FakeServer) -> dict[str, str]:
    reply = ask(f"{server.address}/weights_checker").json()
    found: dict[str, str] = reply["ranks"][0]["checksums"]
    return found


def sums(weights: dict[str, Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in weights.items()}


def updates(server: FakeServer) -> int:
    return int(server.state()["events"]["update"])


def test_everything_once_and_then_what_changed(
    server: FakeServer, receiver: Receiver, pusher: WeightPusher
) -> None:
    weights = first_weights()
    size = sum(each.nbytes for each in weights.values())
    whole = pusher.push(weights.items(), 1, [peer(server, receiver)])
    assert not whole.failed, whole
    assert held(server) == sums(weights)
    assert size < whole.wire_bytes < 1.01 * size + 2000

    few = changed_rows(weights)
    report = pusher.push(weights.items(), 2, [peer(server, receiver)])
    assert not report.failed, report
    assert held(server) == sums(weights)
    assert few / 2 < report.wire_bytes <= 1.1 * few
    assert ask(f"{server.address}/model_info").json()["weight_version"] == "2"

    before = updates(server)
    nothing = pusher.push(weights.items(), 3, [peer(server, receiver)])
    assert not nothing.failed, nothing
    assert nothing.wire_bytes < 500
    assert updates(server) == before + 1, "one small tensor, for the version"
    assert ask(f"{server.address}/model_info").json()["weight_version"] == "3"


def test_a_server_that_sleeps_between_updates_gets_everything_from_its_receiver(
    server: FakeServer, receiver: Receiver
) -> None:
    options = WeightSync(transport="delta", deadline_s=20)
    config = SimpleNamespace(weight_sync=options, placement=SimpleNamespace(sleeps=True))
    transport = load_plugins(only=()).get("register_weight_transports", "delta").make(config, None)
    pusher = WeightPusher(options, transport, Buffers(partial(torch.empty, dtype=torch.uint8)))
    weights = first_weights()
    assert not pusher.push(weights.items(), 1, [peer(server, receiver)]).failed
    before, few = updates(server), changed_rows(weights)
    report = pusher.push(weights.items(), 2, [peer(server, receiver)])
    assert not report.failed, report
    assert updates(server) > before + 2, "also the tensors that are as they were"
    assert report.wire_bytes <= 1.1 * few
    pusher.close()


def test_a_server_that_was_started_again_gets_everything_from_its_receiver(
    short_lived: FakeServer, receiver: Receiver, pusher: WeightPusher
) -> None:
    receiver.serve(SGLangPeer(address=short_lived.address))
    weights = first_weights()
    assert not pusher.push(weights.items(), 1, [peer(short_lived, receiver)]).failed
    short_lived.start()
    receiver.serve(SGLangPeer(address=short_lived.address, incarnation=1))
    few = changed_rows(weights)
    report = pusher.push(weights.items(), 2, [peer(short_lived, receiver, incarnation=1)])
    assert not report.failed, report
    assert held(short_lived) == sums(weights)
    assert report.wire_bytes <= 1.1 * few


def test_a_receiver_that_was_started_again_gets_everything(
    server: FakeServer, receiver: Receiver, pusher: WeightPusher
) -> None:
    weights = first_weights()
    assert not pusher.push(weights.items(), 1, [peer(server, receiver)]).failed
    other = Receiver(
        SGLangPeer(address=server.address), host="127.0.0.1", bucket_bytes=1 << 16, deadline_s=20
    )
    changed_rows(weights)
    report = pusher.push(weights.items(), 2, [peer(server, other)])
    assert not report.failed
    assert report.wire_bytes > report.bytes
    assert held(server) == sums(weights)
    other.close()


def test_a_wrong_byte_on_the_way_is_named_before_the_server_hears_of_it(
    server: FakeServer, receiver: Receiver, pusher: WeightPusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = first_weights()
    assert not pusher.push(weights.items(), 1, [peer(server, receiver)]).failed
    before = sums(weights)
    changed_rows(weights)

    def damaged(change: Change, held: Any, itemsize: int) -> None:
        held[5] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(receiving, "apply_change", damaged)
        (failed,) = pusher.push(weights.items(), 2, [peer(server, receiver)]).failed
    assert (failed.state, failed.version) == ("serving", 1)
    assert "model.layers.3.mlp.down_proj.weight was corrupted" in (failed.error or "")
    assert held(server) == before
    assert server.state()["paused"] is False

    report = pusher.push(weights.items(), 3, [peer(server, receiver)])
    assert not report.failed
    assert held(server) == sums(weights)


def test_a_server_that_refuses_to_load_is_unusable_and_repaired_by_the_next(
    server: FakeServer, receiver: Receiver, pusher: WeightPusher
) -> None:
    weights = first_weights()
    assert not pusher.push(weights.items(), 1, [peer(server, receiver)]).failed
    changed_rows(weights)
    server.fault("refuse", "update", 1)
    (failed,) = pusher.push(weights.items(), 2, [peer(server, receiver)]).failed
    assert failed.state == "unusable"
    assert server.state()["paused"] is True
    report = pusher.push(weights.items(), 3, [peer(server, receiver)])
    assert not report.failed, report
    assert report.wire_bytes < 500, "its receiver had them already"
    assert held(server) == sums(weights)


def test_a_stranger_is_refused(server: FakeServer, receiver: Receiver) -> None:
    assert ask(f"http://{receiver.address}/state", b"{}").status == 403


def test_a_server_without_a_receiver_is_refused_before_anything_is_sent(
    server: FakeServer, pusher: WeightPusher
) -> None:
    stream = iter(first_weights().items())
    (failed,) = pusher.push(stream, 1, [SGLangPeer(address=server.address)]).failed
    assert "has no receiver, which" in (failed.error or "")
    assert failed.state == "serving"
    assert next(stream, None) is None


def test_a_tensor_that_a_server_has_damaged_is_repaired_although_it_did_not_change(
    pusher: WeightPusher, receiver: Receiver, server: FakeServer
) -> None:
    weights = first_weights()
    server.fault("corrupt", "update", 1)
    (failed,) = pusher.push(weights.items(), 1, [peer(server, receiver)]).failed
    assert failed.state == "unusable"
    changed_rows(weights)
    assert not pusher.push(weights.items(), 2, [peer(server, receiver)]).failed
    assert held(server) == {name: checksum(tensor) for name, tensor in weights.items()}
