"""Whole versions or none, to servers that are processes of their own and speak SGLang's API."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.config.schema import WeightSync
from anygauge.serving.sglang.weights import SGLangPeer, SGLangTarget
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.checksum import checksum
from anygauge.weight_sync.control import EngineControl
from anygauge.weight_sync.pusher import WeightPusher
from anygauge.weight_sync.sharing import shared_memory
from anygauge.weight_sync.transports import distributed
from anygauge.weight_sync.transports.disk import DiskTransport
from anygauge.weight_sync.transports.distributed import DistributedTransport
from anygauge.weight_sync.transports.tensor import TensorTransport
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.sglang import WeightApi
from anygauge_hooks.weights import WeightBucket, WeightTransport, WeightUpdate
from anygauge_tests.fake_engine import FakeServer
from anygauge_tests.http_requests import ask

BUCKET = 4096
TRANSPORTS = ("tensor", "disk", "distributed")


def weights(version: int) -> dict[str, Tensor]:
    """Return tensors of several dtypes and sizes; one is larger than a bucket."""
    generator = torch.Generator().manual_seed(version)
    found = {
        f"model.layers.{layer}.mlp.down_proj.weight": torch.randn(24, 32, generator=generator)
        for layer in range(4)
    }
    found["model.norm.weight"] = torch.randn(7, generator=generator).bfloat16()
    found["lm_head.weight"] = torch.randn(64, 32, generator=generator)
    found["model.scale"] = torch.tensor(float(version))
    return found


def peer(server: FakeServer, **more: Any) -> SGLangPeer:
    more.setdefault("api", WeightApi(checksums="sha256"))
    return SGLangPeer(address=server.address, tensor_parallel=server.options.tp_size, **more)


def make(transport: str, directory: Path, **options: Any) -> WeightPusher:
    deadline_s = options.setdefault("deadline_s", 60.0)
    makers: dict[str, Callable[[], WeightTransport]] = {
        "tensor": TensorTransport,
        "disk": lambda: DiskTransport(directory, directory / "model"),
        "distributed": lambda: DistributedTransport("cpu", {"cpu": "gloo"}, deadline_s=deadline_s),
    }
    allocate = shared_memory if transport == "tensor" else partial(torch.empty, dtype=torch.uint8)
    given = WeightSync(transport=transport, bucket_bytes=BUCKET, **options)
    return WeightPusher(given, makers[transport](), Buffers(allocate))


@pytest.fixture
def push(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightPusher]:
    pusher = make(request.param, tmp_path, verify="always")
    yield pusher
    pusher.close()


def get(server: FakeServer, path: str) -> Any:
    return ask(server.address + path).json()


def held(server: FakeServer) -> list[dict[str, str]]:
    return [rank["checksums"] for rank in get(server, "/weights_checker")["ranks"]]


def expected(version: int) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in weights(version).items()}


@pytest.mark.parametrize("push", TRANSPORTS, indirect=True)
def test_every_process_of_every_server_holds_what_was_sent_and_tells_the_version(
    push: WeightPusher, servers: tuple[FakeServer, FakeServer]
) -> None:
    for version in (3, 4):
        report = push.push(weights(version).items(), version, [peer(each) for each in servers])
        assert not report.failed, report
        assert report.checksums == expected(version)
        assert report.unverified == ()
        for server in servers:
            assert held(server) == [expected(version)] * server.options.tp_size
            assert get(server, "/model_info")["weight_version"] == str(version)
            assert server.state()["paused"] is False
    assert report.bytes == report.wire_bytes == sum(each.nbytes for each in weights(4).values())
    assert report.buckets > 3
    assert report.metrics()["weight_sync/failed_engines"] == 0


@pytest.mark.parametrize("push", TRANSPORTS, indirect=True)
def test_a_wrong_bit_is_found_and_its_tensor_named(
    push: WeightPusher, servers: tuple[FakeServer, FakeServer]
) -> None:
    server = servers[0]
    server.fault("corrupt", "update", 1)
    report = push.push(weights(5).items(), 5, [peer(server)])
    (failed,) = report.failed
    assert failed.state == "unusable"
    assert failed.version is None
    name = next(iter(weights(5)))
    assert failed.error is not None
    assert f"does not have the weights that were sent as version 5: {name}." in failed.error
    assert server.state()["paused"] is True, "mixed weights generate nothing"

    repaired = push.push(weights(6).items(), 6, [peer(server)])
    assert not repaired.failed
    assert held(server) == [expected(6)]
    assert server.state()["paused"] is False


@pytest.mark.parametrize("push", ["tensor", "distributed"], indirect=True)
def test_a_refused_begin_leaves_the_old_version_in_use(
    push: WeightPusher, servers: tuple[FakeServer, FakeServer]
) -> None:
    server = servers[0]
    assert not push.push(weights(7).items(), 7, [peer(server)]).failed
    server.fault("refuse", "begin", 1)
    server.fault("refuse", "begin", 2)  # it is asked again, in case an update was left open
    stream = iter(weights(8).items())
    report = push.push(stream, 8, [peer(server)])
    (failed,) = report.failed
    assert (failed.state, failed.version) == ("serving", 7)
    assert "/begin_weight_update refused" in (failed.error or "")
    assert next(stream, None) is None, "the other ranks iterate to the end, so rank 0 does"
    assert held(server) == [expected(7)]
    assert server.state()["paused"] is False


@pytest.mark.parametrize("push", ["tensor", "distributed"], indirect=True)
def test_a_half_finished_update_makes_unusable_and_the_next_whole_one_repairs(
    push: WeightPusher, servers: tuple[FakeServer, FakeServer]
) -> None:
    server = servers[0]
    assert not push.push(weights(9).items(), 9, [peer(server)]).failed
    server.fault("refuse", "update", 2)
    (failed,) = push.push(weights(10).items(), 10, [peer(server)]).failed
    assert failed.state == "unusable"
    assert server.state()["paused"] is True
    assert get(server, "/model_info")["weight_version"] == "9", "no label before the last bucket"
    assert not push.push(weights(11).items(), 11, [peer(server)]).failed
    assert held(server) == [expected(11)]
    assert server.state()["paused"] is False


def test_a_server_that_does_not_go_on_is_not_said_to_serve_the_old_version(
    short_lived: FakeServer, tmp_path: Path
) -> None:
    pusher = make("tensor", tmp_path, deadline_s=1.0)
    assert not pusher.push(weights(1).items(), 1, [peer(short_lived)]).failed
    short_lived.fault("hang", "continue", 1)
    (failed,) = pusher.push(weights(2).items(), 2, [peer(short_lived)]).failed
    assert (failed.state, failed.version) == ("unusable", None)
    pusher.close()


def test_what_was_before_a_start_says_nothing_of_the_server_after_it(
    short_lived: FakeServer, tmp_path: Path
) -> None:
    pusher = make("tensor", tmp_path)
    assert not pusher.push(weights(1).items(), 1, [peer(short_lived)]).failed
    for count in (1, 2):
        short_lived.fault("refuse", "begin", count)
    (failed,) = pusher.push(weights(2).items(), 2, [peer(short_lived, incarnation=1)]).failed
    assert (failed.state, failed.version) == ("serving", None)
    pusher.close()


def test_one_server_that_refuses_does_not_hold_back_another(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    pusher = make("tensor", tmp_path)
    servers[0].fault("refuse", "update", 2)
    report = pusher.push(weights(12).items(), 12, [peer(each) for each in servers])
    assert [each.state for each in report.peers] == ["unusable", "serving"]
    assert held(servers[1]) == [expected(12)] * 2
    assert not pusher.push(weights(13).items(), 13, [peer(each) for each in servers]).failed
    pusher.close()


def test_shared_memory_is_not_copied_into_place() -> None:
    """Half a million page faults for a bucket of 1 GiB, of which a small model fills little."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = shared_memory(64 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 4096
    assert memory.is_shared()
    assert memory.untyped_storage().nbytes() == 64 << 20


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_the_deadline_names_bucket_tensor_and_server(
    transport: str, servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    server = servers[0]
    pusher = make(transport, tmp_path)
    assert not pusher.push(weights(13).items(), 13, [peer(server)]).failed  # to form a group takes longer
    pusher._options = pusher._options.model_copy(update={"deadline_s": 1.5})
    if isinstance(pusher._transport, DistributedTransport):
        pusher._transport._deadline_s = 1.5
    server.fault("stall", "update", 2, 3.0)
    (failed,) = pusher.push(weights(14).items(), 14, [peer(server)]).failed
    assert failed.state == "unusable"
    for words in ("bucket 1 of version 14", "model.layers.1.mlp.down_proj.weight", server.address, "1.5 s"):
        assert words in (failed.error or "")
    pusher.close()
    again = make(transport, tmp_path)
    assert not again.push(weights(15).items(), 15, [peer(server)]).failed
    again.close()


@pytest.mark.parametrize("push", ["distributed"], indirect=True)
def test_the_group_is_made_again_for_a_server_that_was_started_again(
    push: WeightPusher, server: FakeServer, short_lived: FakeServer
) -> None:
    assert not push.push(weights(1).items(), 1, [peer(short_lived)]).failed
    short_lived.start()
    assert not push.push(weights(2).items(), 2, [peer(short_lived, incarnation=1)]).failed
    assert held(short_lived) == [expected(2)]
    short_lived.close()
    (failed,) = push.push(weights(3).items(), 3, [peer(short_lived, incarnation=1)]).failed
    assert "cannot be asked" in (failed.error or "")
    assert not push.push(weights(4).items(), 4, [peer(server)]).failed


def test_a_server_that_ends_within_a_broadcast_is_waited_for_until_the_deadline(
    short_lived: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher = make("distributed", tmp_path, deadline_s=2.0)
    assert not pusher.push(weights(1).items(), 1, [peer(short_lived)]).failed
    send = pusher._transport.send

    def fatal(bucket: WeightBucket, update: WeightUpdate) -> None:
        if bucket.index == 1:
            short_lived.close()
        send(bucket, update)

    monkeypatch.setattr(pusher._transport, "send", fatal)
    started = time.monotonic()
    (failed,) = pusher.push(weights(2).items(), 2, [peer(short_lived)]).failed
    assert time.monotonic() - started < 10
    assert "cannot be asked" in (failed.error or "")
    pusher.close()


def test_a_process_maps_the_memory_and_joins_the_group(tmp_path: Path) -> None:
    with FakeServer() as server:
        for version, transport in enumerate(("tensor", "distributed"), start=1):
            pusher = make(transport, tmp_path, verify="always")
            assert not pusher.push(weights(version).items(), version, [peer(server)]).failed
            assert held(server) == [expected(version)]
            pusher.close()
        pusher = make("distributed", tmp_path)
        assert not pusher.push(weights(3).items(), 3, [peer(server)]).failed
        server.kill()
        (failed,) = pusher.push(weights(4).items(), 4, [peer(server)]).failed
        assert "cannot be asked" in (failed.error or "")
        pusher.close()


def test_the_group_is_formed_over_ipv6(ipv6_server: FakeServer, tmp_path: Path) -> None:
    pusher = make("distributed", tmp_path, verify="always")
    report = pusher.push(weights(1).items(), 1, [peer(ipv6_server)])
    assert not report.failed, report
    assert held(ipv6_server) == [expected(1)]
    pusher.close()


def test_ends_that_would_form_groups_of_another_kind_are_both_named(server: FakeServer) -> None:
    backends = {"cpu": "gloo", "abacus": "beads"}
    transport = DistributedTransport("cpu", backends, deadline_s=20.0)
    for device, theirs in (("abacus", "beads"), ("sundial", "a library that is not known here")):
        with pytest.raises(RolloutError) as caught:
            transport.connect([peer(server), peer(server, device=device)])
        text = str(caught.value)
        assert f"{server.address} runs on {device!r} and forms groups with {theirs};" in text
        assert "training rank 0 runs on 'cpu' and forms groups with gloo." in text


def test_a_server_that_forms_groups_of_another_kind_refuses_and_names_both(server: FakeServer) -> None:
    control = SGLangTarget(peer(server), deadline_s=20.0)
    with pytest.raises(RolloutError, match="asked for a group over beads; on cpu it is over gloo"):
        control.post("/init_weights_update_group", {"backend": "beads"}, what="the group for weights")
    control.close()


def test_without_flattened_broadcasts_and_sessions_tensors_go_one_by_one(
    old_server: FakeServer, tmp_path: Path
) -> None:
    api = WeightApi(checksums="sha256", has_session=False, has_flattened_broadcast=False)
    pusher = make("distributed", tmp_path, verify="always")
    assert not pusher.push(weights(3).items(), 3, [peer(old_server, api=api)]).failed
    assert held(old_server) == [expected(3)]
    assert "begin" not in old_server.state()["events"]
    pusher.close()


def test_the_disk_keeps_the_last_whole_version_alone(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("old weights")
    pusher = make("disk", tmp_path)
    for version in (1, 2):
        assert not pusher.push(weights(version).items(), version, [peer(servers[0])]).failed
    (kept,) = tmp_path.glob("version-*")
    assert kept.name == "version-2"
    assert (kept / "config.json").read_text() == "{}"
    assert not (kept / "model.safetensors").exists()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(3).items())[:3]
        raise MemoryError("gathering failed")

    with pytest.raises(MemoryError):
        pusher.push(broken(), 3, [peer(servers[0])])
    assert [path.name for path in tmp_path.iterdir() if "version" in path.name] == ["version-2"]
    assert held(servers[0]) == [expected(2)]
    assert servers[0].state()["paused"] is False
    pusher.close()


def test_verification_can_be_of_the_first_update_of_each_server_or_of_none(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    pusher = make("tensor", tmp_path, verify="first")
    reports = [
        pusher.push(weights(number).items(), number, [peer(servers[0], incarnation=incarnation)])
        for number, incarnation in ((1, 0), (2, 0), (3, 1))
    ]
    assert [bool(report.checksums) for report in reports] == [True, False, True]
    pusher.close()


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_where_servers_tell_no_checksums_what_lay_ready_is_compared_with_what_was_gathered(
    server: FakeServer, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher = make(transport, tmp_path, verify="always")
    quiet = [peer(server, api=WeightApi(checksums="none"))]
    assert not pusher.push(weights(1).items(), 1, quiet).failed
    send = pusher._transport.send

    def damaged(bucket: WeightBucket, update: WeightUpdate) -> None:
        send(bucket, update)
        if bucket.index == 1:
            bucket.data[5] += 1

    monkeypatch.setattr(pusher._transport, "send", damaged)
    (failed,) = pusher.push(weights(2).items(), 2, quiet).failed
    assert failed.state == "unusable"
    assert "model.layers.1.mlp.down_proj.weight was damaged on its way" in (failed.error or "")
    monkeypatch.undo()
    assert not pusher.push(weights(3).items(), 3, quiet).failed
    pusher.close()


def test_broadcasts_are_waited_for_once_and_buckets_leave_room_for_what_is_converted(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pusher = make("distributed", tmp_path, verify="none")
    happened: list[Any] = []
    send = pusher._transport.send

    def noted(bucket: WeightBucket, update: WeightUpdate) -> None:
        send(bucket, update)
        happened.append((bucket.data.numel(), len(bucket.tensors)))

    monkeypatch.setattr(pusher._transport, "send", noted)
    monkeypatch.setattr(distributed, "finish", lambda device: happened.append(device.type))
    assert not pusher.push(weights(1).items(), 1, [peer(server)]).failed
    assert happened[-1] == "cpu", "the end waits"
    assert all(size <= BUCKET * 15 // 16 or count == 1 for size, count in happened[:-1])
    pusher.close()


@pytest.mark.parametrize("answer", [{}, {"ranks": None}, {"ranks": []}, {"ranks": [{"checksums": {}}]}])
def test_a_server_that_tells_no_checksums_is_not_taken_for_verified(
    answer: Any, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = EngineControl.post

    def silent(self: EngineControl, path: str, body: Any, *, what: str) -> Any:
        return answer if path == "/weights_checker" else post(self, path, body, what=what)

    monkeypatch.setattr(EngineControl, "post", silent)
    pusher = make("tensor", tmp_path, verify="always")
    (failed,) = pusher.push(weights(1).items(), 1, [peer(server)]).failed
    assert "told no checksums" in (failed.error or "")
    pusher.close()
