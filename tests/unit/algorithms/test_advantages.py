"""Group-relative advantages against values worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anygauge.algorithms.advantages import grpo

REWARDS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=16)


def test_centers_and_scales() -> None:
    # mean 2, deviations -2 0 2, sample variance 8 / 2
    advantages = grpo(torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64), eps=0.0)
    assert advantages.tolist() == [-1.0, 0.0, 1.0]


def test_eps_is_added_to_the_deviation() -> None:
    advantages = grpo(torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64), eps=2.0)
    assert advantages.tolist() == [-0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("center", "scale", "expected"),
    [
        (True, False, [-2.0, 0.0, 2.0]),
        (False, True, [0.0, 1.0, 2.0]),
        (False, False, [0.0, 2.0, 4.0]),
    ],
)
def test_switches(center: bool, scale: bool, expected: list[float]) -> None:
    rewards = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64)
    assert grpo(rewards, center=center, scale=scale, eps=0.0).tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -3.7])
def test_equal_rewards_give_exact_zeros(size: int, reward: float) -> None:
    assert grpo(torch.full((size,), reward)).tolist() == [0.0] * size
    assert grpo(torch.full((size,), reward), scale=False).tolist() == [0.0] * size
    assert grpo(torch.full((size,), reward), center=False).tolist() == [0.0] * size


def test_both_switches_off_keep_the_rewards_of_an_equal_group() -> None:
    assert grpo(torch.ones(3), center=False, scale=False).tolist() == [1.0] * 3


def test_deviations_that_float32_cannot_square() -> None:
    rewards = torch.tensor([-1e30, 0.0, 1e30])
    advantages = grpo(rewards)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [-1.0, 0.0, 1.0]
    assert grpo(rewards, scale=False).tolist() == rewards.tolist()


@given(REWARDS)
def test_is_finite_and_keeps_the_order(rewards: list[float]) -> None:
    advantages = grpo(torch.tensor(rewards, dtype=torch.float64))
    assert torch.isfinite(advantages).all()
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    ranked = advantages[order]
    assert (ranked[1:] >= ranked[:-1]).all()


@given(REWARDS)
def test_centered_advantages_add_up_to_nothing(rewards: list[float]) -> None:
    advantages = grpo(torch.tensor(rewards, dtype=torch.float64), scale=False)
    assert abs(float(advantages.sum())) <= 1e-9
