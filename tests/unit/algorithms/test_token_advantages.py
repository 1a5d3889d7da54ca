"""Token-level estimators against loops over tokens in float64, written as the papers write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anygauge.algorithms.scan import discounted_sums
from anygauge.algorithms.token_advantages import (
    gae,
    on_policy_distillation,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
)
from anygauge.algorithms.whitening import explained_variance, masked_mean, whiten
from anygauge_hooks.algorithms import AdvantageInputs

MASKS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=6)
SHARE = st.floats(0.0, 1.0)


def alone(x: Tensor) -> Tensor:
    """Stand for the sum over one rank."""
    return x.clone()


def make_inputs(masks: Sequence[Sequence[int]], seed: int = 0, kl_coef: float = 0.1) -> AdvantageInputs:
    """Return random samples; what must not count is not finite."""
    lengths = [len(mask) for mask in masks]
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    mask = torch.tensor([value for each in masks for value in each], dtype=torch.float64)
    scores, kl = draw(len(masks)), draw(sum(lengths))
    return AdvantageInputs(
        lengths=lengths,
        loss_mask=mask,
        scores=scores,
        baselines=draw(len(masks)),
        rewards=token_rewards(scores, mask, lengths, kl_T=kl, kl_coef=kl_coef),
        log_probs=draw(sum(lengths)),
        values=draw(sum(lengths)).masked_fill(mask == 0, torch.nan),
        teacher_log_probs=draw(sum(lengths)),
        total=alone,
    )


def split(inputs: AdvantageInputs, values: Tensor | None) -> list[list[float]]:
    assert values is not None
    return [part.tolist() for part in values.split(list(inputs.lengths))]


def backwards(values: Sequence[float], decay: float) -> list[float]:
    """Return the discounted sum from each place on."""
    sums: list[float] = []
    following = 0.0
    for value in reversed(values):
        following = value + decay * following
        sums.insert(0, following)
    return sums


def textbook_gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lambd: float
) -> list[float]:
    following = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * after - value for r, after, value in zip(rewards, following, values, strict=True)]
    return backwards(deltas, gamma * lambd)


def counted(values: Sequence[float], mask: Sequence[int]) -> list[float]:
    return [value for value, counts in zip(values, mask, strict=True) if counts]


def spread(values: Sequence[float], mask: Sequence[int]) -> list[float]:
    found = iter(values)
    return [next(found) if counts else 0.0 for counts in mask]


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8), decay=SHARE)
def test_a_scan_is_the_recursion(lengths: list[int], decay: float) -> None:
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = [part.tolist() for part in discounted_sums(values, decay, lengths).split(lengths)]
    expected = [backwards(part.tolist(), decay) for part in values.split(lengths)]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)


@settings(max_examples=40)
@given(masks=MASKS, kl_coef=SHARE)
def test_the_score_is_at_the_last_token_that_counts(masks: list[list[int]], kl_coef: float) -> None:
    lengths = [len(mask) for mask in masks]
    scores = torch.arange(1.0, len(masks) + 1, dtype=torch.float64)
    kl = torch.linspace(-1, 1, sum(lengths), dtype=torch.float64)
    mask = torch.tensor([value for each in masks for value in each], dtype=torch.float64)
    found = token_rewards(scores, mask, lengths, kl_T=kl, kl_coef=kl_coef)
    parts = zip(masks, scores.tolist(), found.split(lengths), kl.split(lengths), strict=True)
    for own_mask, score, rewards, own_kl in parts:
        expected = [
            -kl_coef * value * counts for value, counts in zip(own_kl.tolist(), own_mask, strict=True)
        ]
        if any(own_mask):
            expected[max(place for place, counts in enumerate(own_mask) if counts)] += score
        assert rewards.tolist() == pytest.approx(expected)


@settings(max_examples=40)
@given(masks=MASKS, gamma=SHARE, lambd=SHARE, seed=st.integers(0, 9))
def test_gae_is_the_textbook_recursion(masks: list[list[int]], gamma: float, lambd: float, seed: int) -> None:
    inputs = make_inputs(masks, seed)
    found = gae(inputs, gamma=gamma, lambd=lambd)
    advantages, returns = split(inputs, found.advantages), split(inputs, found.returns)
    values, rewards = split(inputs, inputs.values), split(inputs, inputs.rewards)
    for number, mask in enumerate(masks):
        own = counted(values[number], mask)
        expected = textbook_gae(counted(rewards[number], mask), own, gamma, lambd)
        assert advantages[number] == pytest.approx(spread(expected, mask), rel=1e-9, abs=1e-12)
        sums = [advantage + value for advantage, value in zip(expected, own, strict=True)]
        assert returns[number] == pytest.approx(spread(sums, mask), rel=1e-9, abs=1e-12)


def test_gae_with_nothing_discounted_is_the_return_less_the_value() -> None:
    inputs = make_inputs([[1, 1, 0, 1], [1]], kl_coef=0.0)
    found = gae(inputs)
    assert found.returns is not None
    first, second = inputs.scores.tolist()
    assert found.returns.tolist() == pytest.approx([first, first, 0.0, first, second])


def test_gae_in_float32_of_a_long_response_is_exact_enough() -> None:
    count = 30_000
    mask = torch.ones(count)
    inputs = replace(
        make_inputs([[1] * count]),
        loss_mask=mask,
        values=torch.rand(count, generator=torch.Generator().manual_seed(0)),
        rewards=token_rewards(torch.ones(1), mask, [count]),
    )
    assert inputs.values is not None
    found = gae(inputs, gamma=1.0, lambd=0.95).advantages
    expected = textbook_gae(inputs.rewards.tolist(), inputs.values.tolist(), 1.0, 0.95)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-5)


def textbook_whiten(values: Sequence[float], eps: float = 1e-8) -> list[float]:
    count = len(values)
    mean = sum(values) / max(count, 1)
    variance = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    return [(value - mean) / (variance + eps) ** 0.5 for value in values]


@settings(max_examples=40)
@given(masks=MASKS, gamma=SHARE)
def test_reinforce_plus_plus_is_the_whitened_return(masks: list[list[int]], gamma: float) -> None:
    inputs = make_inputs(masks)
    rewards = split(inputs, inputs.rewards)
    sums = [backwards(counted(own, mask), gamma) for own, mask in zip(rewards, masks, strict=True)]
    white = iter(textbook_whiten([value for own in sums for value in own]))
    expected = [next(white) if counts else 0.0 for mask in masks for counts in mask]
    found = reinforce_plus_plus(inputs, gamma=gamma)
    assert found.advantages.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-7)
    assert found.returns is None


@settings(max_examples=40)
@given(masks=MASKS)
def test_the_baseline_variant_is_the_whitened_difference_to_the_group(masks: list[list[int]]) -> None:
    inputs = make_inputs(masks)
    centered = (inputs.scores - inputs.baselines).tolist()
    tokens = [value for value, mask in zip(centered, masks, strict=True) for counts in mask if counts]
    white = iter(textbook_whiten(tokens))
    expected = [next(white) if counts else 0.0 for mask in masks for counts in mask]
    found = reinforce_plus_plus_baseline(inputs).advantages.tolist()
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-7)


def test_distillation_is_what_the_teacher_finds_likelier() -> None:
    inputs = make_inputs([[1, 0, 1]])
    assert inputs.teacher_log_probs is not None
    first, _, last = (inputs.teacher_log_probs - inputs.log_probs).tolist()
    assert on_policy_distillation(inputs).advantages.tolist() == [first, 0.0, last]


class Ranks:
    """Ranks in turns: each round collects what they give to one more sum, and has the sums before."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.sums: list[Tensor] = []

    def run(self, function: Any) -> list[Any]:
        """Call ``function(part, total)`` for each part until every sum it asks for is known."""
        while True:
            given: list[Tensor] = []
            results = [self._call(function, part, given) for part in self.parts]
            if not given:
                return results
            self.sums.append(torch.stack(given).sum(0))

    def _call(self, function: Any, part: Any, given: list[Tensor]) -> Any:
        asked = iter(self.sums)

        def total(x: Tensor) -> Tensor:
            known = next(asked, None)
            if known is None:
                given.append(x)
                raise InterruptedError
            return known

        try:
            return function(part, total)
        except InterruptedError:
            return None


@settings(max_examples=30)
@given(size=st.integers(2, 60), num_ranks=st.integers(1, 5), data=st.data())
def test_whitening_does_not_depend_on_the_ranks(size: int, num_ranks: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator, dtype=torch.float64) * 3 + 7
    mask = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
    rank_of = torch.arange(size) % num_ranks
    whole = whiten(values, mask, alone)
    parts = [rank_of == rank for rank in range(num_ranks)]
    found = Ranks(parts).run(lambda own, total: whiten(values[own], mask[own], total))
    for own, part in zip(parts, found, strict=True):
        torch.testing.assert_close(part, whole[own], rtol=1e-9, atol=1e-9)
    if int(mask.sum()) > 1:
        assert float(whole[mask != 0].mean()) == pytest.approx(0.0, abs=1e-9)
        assert float(whole[mask != 0].std()) == pytest.approx(1.0, rel=1e-6)


def test_whitening_ignores_what_does_not_count() -> None:
    values = torch.tensor([1.0, torch.nan, 3.0])
    assert whiten(values, torch.tensor([1, 0, 1]), alone).tolist() == pytest.approx(
        [-(0.5**0.5), 0.0, 0.5**0.5]
    )


@pytest.mark.parametrize("values", [[], [0.1] * 7])
def test_whitening_of_equal_values_is_zero(values: list[float]) -> None:
    white = whiten(torch.tensor(values), torch.ones(len(values)), alone)
    assert white.abs().tolist() == pytest.approx([0.0] * len(values), abs=1e-6)


def test_explained_variance() -> None:
    returns, mask = torch.tensor([0.0, 2.0, 9.0, 4.0]), torch.tensor([1, 1, 0, 1])
    assert explained_variance(returns, returns, mask, alone) == 1.0
    assert explained_variance(torch.full((4,), 5.0), returns, mask, alone) == 0.0
    assert explained_variance(torch.zeros(4), torch.ones(4), mask, alone) == 0.0
    half = explained_variance(returns / 2, returns, mask, alone)
    assert half == pytest.approx(0.75)
    assert masked_mean(returns, mask, alone) == 2.0
    parts = Ranks([slice(0, 1), slice(1, 4)])
    values = returns / 2
    found = parts.run(lambda own, total: explained_variance(values[own], returns[own], mask[own], total))
    assert found == pytest.approx([0.75, 0.75])
