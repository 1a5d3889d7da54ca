"""Tensor differences, encoded in few bytes and decoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anygauge.weight_sync.changes import apply_change, bytes_view, changed, framed, unframed, whole
from anygauge.weight_sync.checksum import checksum
from anygauge_hooks.weights import WeightTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)


@given(
    size=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    moved=st.lists(st.integers(0, 4799), max_size=40),
    data=st.data(),
)
def test_a_change_turns_the_old_bytes_into_the_new_ones(
    size: int, dtype: torch.dtype, moved: list[int], data: st.DataObject
) -> None:
    old = torch.frombuffer(bytearray(range(256)) * 20, dtype=torch.uint8)[: size * dtype.itemsize].clone()
    new = old.clone()
    for place in moved:
        new[place % new.numel()] = data.draw(st.integers(0, 255))
    before, after = old.view(dtype), new.view(dtype)
    change = changed(3, bytes_view(before), bytes_view(after), dtype.itemsize)
    assert (change is None) is torch.equal(old, new)
    if change is None:
        return
    _, (arrived,) = unframed(framed([], [change._replace(checksum=checksum(after))]))
    assert arrived.tensor == 3
    assert arrived.checksum == checksum(after)
    apply_change(arrived, bytes_view(before), dtype.itemsize)
    assert torch.equal(old, new)


def test_a_whole_tensor_travels_with_its_name_and_shape() -> None:
    tensor = torch.randn(3, 4).bfloat16()
    place = WeightTensor("model.norm.weight", (3, 4), "bfloat16", 0, 24)
    names, (change,) = unframed(framed([place], [whole(0, bytes_view(tensor), checksum(tensor))]))
    assert names == [("model.norm.weight", [3, 4], "bfloat16")]
    arrived = torch.empty(3, 4, dtype=torch.bfloat16)
    apply_change(change, bytes_view(arrived), 2)
    assert torch.equal(arrived, tensor)


@given(end=st.integers(0, 200))
def test_a_message_that_was_cut_is_refused(end: int) -> None:
    old, new = torch.zeros(50), torch.arange(50).float()
    change = changed(0, bytes_view(old), bytes_view(new), 4)
    assert change is not None
    data = framed([], [change._replace(checksum=checksum(new))])
    if end >= len(data) or end == 8:  # the length alone is a message without changes
        return
    with pytest.raises(ValueError, match=r"a (message|change) ends"):
        unframed(data[:end])


def moved_bytes(old: Tensor, new: Tensor) -> tuple[int, int]:
    """Return the bytes of a frame, and of the elements that changed."""
    change = changed(0, bytes_view(old), bytes_view(new), old.itemsize)
    assert change is not None
    elements = int((old.view(-1) != new.view(-1)).sum())
    return len(framed([], [change._replace(checksum=checksum(new))])), elements * old.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_changed_cost_their_own_bytes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(512, 256, generator=generator).to(dtype)
    new = old.clone()
    new[100:140] = torch.randn(40, 256, generator=generator).to(dtype)
    sent, few = moved_bytes(old, new)
    assert sent <= 1.1 * few


def test_a_small_step_in_bfloat16_costs_less_than_the_elements_that_it_changed() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(512, 512, generator=generator) * 0.02
    step = torch.randn(512, 512, generator=generator).sign() * 1e-6
    sent, few = moved_bytes(master.bfloat16(), (master + step).bfloat16())
    assert 0 < few < 0.2 * master.numel() * 2
    assert sent <= few
    _, rare = moved_bytes(master.bfloat16(), (master + step / 50).bfloat16())
    assert 0 < rare < few / 10, "gaps, and not bits, tell where these are"


def test_nothing_changed_is_nothing() -> None:
    same = torch.randn(7)
    assert changed(0, bytes_view(same), bytes_view(same.clone()), 4) is None
    assert framed([], []) == b"\0" * 8
    assert np.array_equal(bytes_view(same), bytes_view(same.clone()))
