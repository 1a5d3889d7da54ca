"""Micro-batches and data-parallel shares: every sample once, within the bounds, the same every time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data.balance import balance
from anygauge.data.packing import pack_by_tokens

LENGTHS = st.lists(st.integers(0, 120), max_size=60)
COSTS = st.lists(st.floats(0, 1e6), max_size=60)


def test_packs_tightly() -> None:
    assert pack_by_tokens([6, 4, 7, 3], 10) == [[0, 1], [2, 3]]


def test_a_longer_sample_is_alone() -> None:
    assert pack_by_tokens([3, 25, 3], 10) == [[0, 2], [1]]


@given(lengths=LENGTHS, max_tokens=st.integers(1, 130))
def test_packing_holds_every_sample_once(lengths: list[int], max_tokens: int) -> None:
    bins = pack_by_tokens(lengths, max_tokens)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert all(indices == sorted(indices) and indices for indices in bins)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 130))
def test_packing_keeps_the_limit(lengths: list[int], max_tokens: int) -> None:
    for indices in pack_by_tokens(lengths, max_tokens):
        assert len(indices) == 1 or sum(lengths[index] for index in indices) <= max_tokens


@given(lengths=LENGTHS, max_tokens=st.integers(120, 130))
def test_packing_needs_few_bins(lengths: list[int], max_tokens: int) -> None:
    at_least = math.ceil(sum(lengths) / max_tokens)
    assert len(pack_by_tokens(lengths, max_tokens)) <= 2 * at_least + 1


def test_balances_cost_and_count() -> None:
    assert balance([8, 1, 2, 6], 2) == [[0, 1], [2, 3]]


@given(costs=COSTS, num_bins=st.integers(1, 9))
def test_balance_holds_every_sample_once_in_equal_numbers(costs: list[float], num_bins: int) -> None:
    bins = balance(costs, num_bins)
    assert len(bins) == num_bins
    assert sorted(index for indices in bins for index in indices) == list(range(len(costs)))
    assert all(indices == sorted(indices) for indices in bins)
    counts = [len(indices) for indices in bins]
    assert max(counts) - min(counts) <= 1


@given(costs=COSTS.filter(bool), num_bins=st.integers(1, 9))
def test_bins_differ_by_one_sample_at_most(costs: list[float], num_bins: int) -> None:
    loads = [sum(costs[index] for index in indices) for indices in balance(costs, num_bins)]
    if len(costs) % num_bins == 0:
        assert max(loads) - min(loads) <= max(costs) * (1 + 1e-9)


@pytest.mark.parametrize("num_bins", [2, 4, 8])
def test_balance_beats_order(num_bins: int) -> None:
    costs = [float(number**2) for number in range(64)]
    size = len(costs) // num_bins
    in_order = max(sum(costs[start : start + size]) for start in range(0, 64, size))
    balanced = max(sum(costs[index] for index in indices) for indices in balance(costs, num_bins))
    assert balanced <= 1.02 * sum(costs) / num_bins < in_order
