"""Weights cut into buckets: whole tensors, in order, within the bound, and the same bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anygauge.weight_sync.buckets import Buffers, cut, overlapped, unpack
from anygauge_hooks.weights import WeightBucket

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool)
shapes = st.lists(st.integers(0, 9), max_size=3)
specs = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12)


def tensors(specs: list[tuple[list[int], torch.dtype]]) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"t{number}", torch.randint(0, 2, shape, generator=generator).to(dtype))
        for number, (shape, dtype) in enumerate(specs)
    ]


def buffers() -> Buffers:
    return Buffers(partial(torch.empty, dtype=torch.uint8))


@given(specs=specs, max_bytes=st.integers(1, 400))
def test_buckets_hold_every_tensor_once_in_order_within_the_bound(
    specs: list[tuple[list[int], torch.dtype]], max_bytes: int
) -> None:
    given_tensors = tensors(specs)
    found: list[tuple[str, Tensor]] = []
    indices, ends = [], []
    for bucket in cut(given_tensors, max_bytes, buffers()):
        assert len(bucket.tensors) <= 1 or bucket.data.numel() <= max_bytes
        assert bucket.data.numel() == sum(each.end - each.start for each in bucket.tensors)
        found += [(name, tensor.clone()) for name, tensor in unpack(bucket.tensors, bucket.data)]
        indices.append(bucket.index)
        ends.append(bucket.last)
    assert [name for name, _ in found] == [name for name, _ in given_tensors]
    for (_, arrived), (_, sent) in zip(found, given_tensors, strict=True):
        assert arrived.dtype == sent.dtype
        assert torch.equal(arrived, sent)
    assert indices == list(range(len(indices)))
    assert ends == [False] * (len(ends) - 1) + [True]


def test_two_buffers_are_used_in_turns_and_grow_for_a_tensor_that_needs_it() -> None:
    held = buffers()
    given_tensors = [(f"t{number}", torch.full((64,), number, dtype=torch.int8)) for number in range(5)]
    places = [bucket.data.data_ptr() for bucket in cut(given_tensors, 64, held)]
    assert len(set(places)) == 2
    assert places[0::2] == [places[0]] * 3
    (large,) = cut([("large", torch.zeros(1000))], 64, held)
    assert large.data.numel() == 4000


def test_a_tensor_that_fills_a_bucket_is_sent_from_where_it_lies_if_its_device_lends() -> None:
    held = Buffers(partial(torch.empty, dtype=torch.uint8), lends="cpu")
    large, small = torch.arange(100.0), torch.ones(4)
    first, second, third = (
        (bucket.data.data_ptr(), [each.name for each in bucket.tensors])
        for bucket in cut([("large", large), ("small", small), ("turned", large.view(10, 10).T)], 64, held)
    )
    assert first == (large.data_ptr(), ["large"])
    assert second[1] == ["small"]
    assert second[0] != small.data_ptr(), "others may lie behind it"
    assert third[1] == ["turned"]
    (whole,) = cut([("turned", large.view(10, 10).T)], 64, held)
    (sent,) = unpack(whole.tensors, whole.data)
    assert torch.equal(sent[1], large.view(10, 10).T)


def test_the_next_bucket_is_made_while_one_is_on_its_way_and_never_over_it() -> None:
    gathered = [threading.Event() for _ in range(6)]
    sent: list[int] = []

    def gather() -> Iterator[tuple[str, Tensor]]:
        for number, event in enumerate(gathered):
            event.set()
            yield f"t{number}", torch.full((64,), number, dtype=torch.int8)

    def send(bucket: WeightBucket) -> None:
        ahead = min(bucket.index + 2, 5)  # the tensor after the one that closed this bucket
        assert gathered[ahead].wait(20), "nothing was gathered while this was on its way"
        assert bucket.data.eq(bucket.index).all()
        sent.append(bucket.index)

    overlapped(cut(gather(), 64, buffers()), send)
    assert sent == list(range(6))


def test_what_sending_raises_comes_out_and_ends_it() -> None:
    sent: list[int] = []

    def send(bucket: WeightBucket) -> None:
        sent.append(bucket.index)
        raise ConnectionError("gone")

    given_tensors = [(f"t{number}", torch.zeros(64, dtype=torch.int8)) for number in range(6)]
    with pytest.raises(ConnectionError, match="gone"):
        overlapped(cut(given_tensors, 64, buffers()), send)
    assert sent == [0]
