"""Token weights and the division of a rollout into optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anygauge.algorithms import aggregation
from anygauge.algorithms.aggregation import Aggregation, split_steps

MASKS = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=10)


def token_weights(masks: Sequence[Sequence[int]], mode: Aggregation, *arguments: Any) -> list[list[float]]:
    """Return the weights of the tokens of each sample."""
    lengths = [len(mask) for mask in masks]
    flat = torch.tensor([value for mask in masks for value in mask], dtype=torch.bool)
    weights = aggregation.token_weights(flat, lengths, mode, *arguments)
    return [part.tolist() for part in torch.split(weights, lengths)] if masks else []


def test_token_mean() -> None:
    assert token_weights([[1, 1, 0], [1]], "token_mean") == [[1 / 3, 1 / 3, 0.0], [1 / 3]]


def test_sample_mean() -> None:
    assert token_weights([[1, 1, 0], [1]], "sample_mean") == [[0.25, 0.25, 0.0], [0.5]]


def test_a_sample_that_does_not_count_is_no_sample() -> None:
    assert token_weights([[0, 0], [1, 1], []], "sample_mean") == [[0.0, 0.0], [0.5, 0.5], []]


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean"])
@given(masks=MASKS)
def test_weights_add_up_to_one(mode: Aggregation, masks: list[list[int]]) -> None:
    weights = token_weights(masks, mode)
    total = sum(map(sum, weights))
    assert total == (pytest.approx(1.0, rel=1e-12) if any(map(any, masks)) else 0)


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean"])
@given(masks=MASKS)
def test_exactly_the_tokens_that_count_weigh(mode: Aggregation, masks: list[list[int]]) -> None:
    weights = token_weights(masks, mode)
    assert [[weight > 0 for weight in row] for row in weights] == [[bool(m) for m in mask] for mask in masks]


@given(masks=MASKS)
def test_every_sample_weighs_the_same_in_a_sample_mean(masks: list[list[int]]) -> None:
    shares = [sum(row) for row in token_weights(masks, "sample_mean") if any(row)]
    assert shares == pytest.approx([1 / max(len(shares), 1)] * len(shares))


@given(size=st.integers(0, 200), num_steps=st.integers(1, 20))
def test_steps_hold_every_sample_once_in_equal_numbers(size: int, num_steps: int) -> None:
    steps = split_steps(range(size), num_steps)
    assert sorted(sample for step in steps for sample in step) == list(range(size))
    assert len(steps) == min(num_steps, size)
    sizes = [len(step) for step in steps]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_every_step_sees_every_group() -> None:
    samples = [(group, sample) for group in range(6) for sample in range(8)]
    for step in split_steps(samples, 4):
        assert sorted(group for group, _ in step) == sorted([*range(6)] * 2)


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "constant_length"])
@given(parts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5))
def test_a_rollout_weighs_the_same_in_however_many_samples(mode: Aggregation, parts: list[list[int]]) -> None:
    others = [[1, 1, 0], [1]]
    joined = [value for part in parts for value in part]
    whole = token_weights([joined, *others], mode, 16)
    divided = token_weights([*parts, *others], mode, 16, [4] * len(parts) + [7, 2])
    assert [weight for part in divided[: len(parts)] for weight in part] == pytest.approx(whole[0])
    assert divided[len(parts) :] == whole[1:]


def test_samples_that_are_rollouts_by_themselves_weigh_as_ever() -> None:
    masks = [[1, 0], [1, 1], [0]]
    plain = token_weights(masks, "sample_mean")
    assert token_weights(masks, "sample_mean", 1, [5, 0, 3]) == plain
