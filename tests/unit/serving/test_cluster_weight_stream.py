"""New weights travel in parts: nothing is lost, nothing is larger than it may be, and errors come through."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from anygauge.runtime.rpc import decode
from anygauge.serving.weight_stream import PickledBucket, StreamedUpdate, WeightSender
from anygauge_hooks.engines import WeightStream
from anygauge_hooks.errors import RolloutError, WeightMappingError

TENSORS = {f"w{i}": torch.full((i + 1, 4), float(i)) for i in range(6)}
CPU = torch.device("cpu")


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield from TENSORS.items()


class Engine:
    """Keeps what it is given, and fails at a name."""

    def __init__(self, fail_at: str = "") -> None:
        self.taken: dict[str, torch.Tensor] = {}
        self.version = 0
        self.fail_at = fail_at

    def update_weights(self, stream: WeightStream, version: int) -> None:
        for name, tensor in stream:
            if name == self.fail_at:
                raise WeightMappingError(f"unknown {name}", hint="none")
            self.taken[name] = tensor
        self.version = version


def parts(sender: WeightSender, max_bytes: int) -> Iterator[PickledBucket]:
    last = False
    while not last:
        bucket = sender.next(weights, max_bytes)
        yield bucket
        last = bucket.last


@pytest.mark.parametrize("max_bytes", [1, 48, 96, 10**9])
def test_parts_hold_every_tensor_once_in_order(max_bytes: int) -> None:
    sender = WeightSender(is_sender=True)
    for _ in range(2):
        buckets = [decode(bucket.data) for bucket in parts(sender, max_bytes)]
        pairs = [pair for bucket in buckets for pair in bucket]
        assert [name for name, _ in pairs] == list(TENSORS)
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in pairs)
        for bucket in buckets:
            assert sum(tensor.nbytes for _, tensor in bucket[:-1]) < max_bytes


def test_every_rank_cuts_alike_and_only_one_sends() -> None:
    sender, other = WeightSender(is_sender=True), WeightSender(is_sender=False)
    for ours, theirs in zip(parts(sender, 96), parts(other, 96), strict=True):
        assert ours.last is theirs.last
        assert theirs.data == b""


def test_a_view_travels_without_what_is_behind_it() -> None:
    whole = torch.zeros(100_000)
    view = whole[:4].expand(2, 4).t()
    bucket = WeightSender(is_sender=True).next(lambda: iter([("row", view)]), 10**6)
    assert len(bucket.data) < 2000
    assert torch.equal(decode(bucket.data)[0][1], torch.zeros(4, 2))


def test_an_engine_takes_the_parts_as_one_stream() -> None:
    engine = Engine()
    update = StreamedUpdate(engine, 7, CPU)  # type: ignore[arg-type]  # has the one method that is called
    for bucket in parts(WeightSender(is_sender=True), 48):
        update.put(bucket.data)
    update.put(None)
    update.finish()
    assert engine.version == 7
    assert list(engine.taken) == list(TENSORS)


def send(update: StreamedUpdate, parts: Sequence[bytes | None]) -> None:
    for data in parts:
        update.put(data)
    update.finish()


def test_what_an_engine_raises_comes_with_a_later_part() -> None:
    update = StreamedUpdate(Engine(fail_at="w1"), 1, CPU)  # type: ignore[arg-type]  # as above
    buckets = [bucket.data for bucket in parts(WeightSender(is_sender=True), 1)]
    with pytest.raises(WeightMappingError, match="unknown w1"):
        send(update, [*buckets, None])


def test_an_update_that_is_given_up_ends() -> None:
    engine = Engine()
    update = StreamedUpdate(engine, 1, CPU)  # type: ignore[arg-type]  # as above
    update.put(WeightSender(is_sender=True).next(weights, 1).data)
    before = threading.active_count()
    update.cancel()
    assert threading.active_count() == before - 1
    assert engine.version == 0
    with pytest.raises(RolloutError, match="given up"):
        update.finish()
