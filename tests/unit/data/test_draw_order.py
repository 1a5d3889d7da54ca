"""The order of draws: permutations, proportions, and going on from any point."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.data.order import Epochs, Mixture, Order

SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.integers(1, 40)
COUNTS = st.lists(st.integers(0, 50), max_size=6)
MIXTURES = st.lists(st.tuples(SIZES, st.floats(0.01, 100)), min_size=1, max_size=5)


def mixture(parts: list[tuple[int, float]], seed: int) -> Mixture:
    return Mixture([size for size, _ in parts], [weight for _, weight in parts], seed)


def drawn(order: Order, *counts: int) -> list[int]:
    return [position for count in counts for position in order.next(count).tolist()]


@given(size=SIZES, seed=SEEDS, epochs=st.integers(1, 3))
def test_every_epoch_has_every_row_once(size: int, seed: int, epochs: int) -> None:
    order = Epochs(size, seed)
    assert all(sorted(order.next(size).tolist()) == list(range(size)) for _ in range(epochs))


def test_epochs_seeds_and_data_sets_have_orders_of_their_own() -> None:
    orders = [drawn(Epochs(50, seed, dataset=dataset), 50, 50) for seed in (0, 1) for dataset in (0, 1)]
    halves = [tuple(half) for order in orders for half in (order[:50], order[50:])]
    assert len(set(halves)) == 8


def test_without_shuffle_rows_keep_their_order() -> None:
    assert drawn(Epochs(3, 7, shuffle=False), 5) == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("make", [lambda: Epochs(5, 1), lambda: Mixture([2, 3], [1, 2], 1)])
def test_nothing_is_drawn_for_nothing(make: Callable[[], Order]) -> None:
    order = make()
    assert order.next(0).tolist() == []
    assert order.state() == make().state()


@given(size=SIZES, seed=SEEDS, counts=COUNTS)
def test_a_restored_epoch_goes_on(size: int, seed: int, counts: list[int]) -> None:
    check_resume(lambda: Epochs(size, seed), counts)


@given(parts=MIXTURES, seed=SEEDS, counts=COUNTS)
def test_a_restored_mixture_goes_on(parts: list[tuple[int, float]], seed: int, counts: list[int]) -> None:
    check_resume(lambda: mixture(parts, seed), counts)


def check_resume(make: Callable[[], Order], counts: list[int]) -> None:
    """Check that an order can be left and taken up after any draw, and does not depend on their sizes."""
    whole, at_once, resumed = make(), make(), make()
    expected = drawn(at_once, sum(counts))
    found: list[int] = []
    for count in counts:
        state = json.loads(json.dumps(resumed.state()))
        resumed = make()
        resumed.restore(state)
        found += drawn(resumed, count)
    assert found == drawn(whole, *counts) == expected
    assert resumed.state() == whole.state() == at_once.state()


@given(parts=MIXTURES, seed=SEEDS, count=st.integers(1, 300))
def test_each_part_of_a_mixture_has_epochs_of_its_own(
    parts: list[tuple[int, float]], seed: int, count: int
) -> None:
    positions = mixture(parts, seed).next(count)
    start = 0
    for size, _ in parts:
        own = positions[(positions >= start) & (positions < start + size)] - start
        for begin in range(0, len(own) - size + 1, size):
            assert sorted(own[begin : begin + size].tolist()) == list(range(size))
        start += size
    assert positions.min() >= 0
    assert positions.max() < start


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [0.2, 0.5, 0.3], [98, 1, 1]])
def test_draws_are_in_proportion_to_the_weights(weights: list[float]) -> None:
    count = 20_000
    owners = Counter((Mixture([10] * len(weights), weights, 3).next(count) // 10).tolist())
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        # Five standard deviations of a binomial distribution.
        assert abs(owners[number] - share * count) < 5 * (count * share * (1 - share)) ** 0.5


def test_the_sum_of_the_weights_may_be_beyond_a_float() -> None:
    assert drawn(Mixture([10, 10], [1e308, 1e308], 3), 50) == drawn(Mixture([10, 10], [1, 1], 3), 50)


def test_neighboring_seeds_choose_differently() -> None:
    first, second = (Mixture([1, 1], [1, 1], seed).next(1000) for seed in (4, 5))
    assert 400 < np.count_nonzero(first != second) < 600


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": 0},
        {"epoch": 0, "cursor": 6},
        {"epoch": -1, "cursor": 0},
        {"epoch": 0, "cursor": "1"},
        {"epoch": 0.5, "cursor": 1},
    ],
)
def test_a_state_that_cannot_be_is_refused(state: dict[str, Any]) -> None:
    order = Epochs(5, 0)
    before = order.next(2)
    with pytest.raises(ValueError, match=r"epoch|cursor|row"):
        order.restore(state)
    assert sorted([*before, *order.next(3)]) == [0, 1, 2, 3, 4]
    whole = Mixture([5, 5], [1, 1], 0)
    whole.next(4)
    kept = whole.state()
    with pytest.raises(ValueError, match=r"epoch|cursor|row"):
        whole.restore({"drawn": 3, "datasets": [{"epoch": 3, "cursor": 1}, state]})
    assert whole.state() == kept


def test_a_million_rows_are_permuted_at_once() -> None:
    order = Epochs(1_000_000, 0)
    positions = order.next(1000)
    assert len(set(positions.tolist())) == 1000
    assert positions.max() > 900_000
