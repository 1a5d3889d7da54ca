"""Drawing tokens: the hash, the distribution, truncation, and what a log-probability is of."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

from anygauge.serving.embedded import sampling
from anygauge.serving.embedded.sampling import draw, seed_tensor, uniforms
from anygauge_hooks.rl import SamplingParams

HOST = torch.device("cpu")


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def draw_many(logits: torch.Tensor, count: int, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``count`` times from one distribution ``[V]``, each time with another seed."""
    prefix = torch.zeros(count, dtype=torch.int64)
    return draw(logits[None], prefix, numbers_of(range(count), 0), params)


def splitmix64(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def numbers_of(seeds: Iterable[int], position: int) -> torch.Tensor:
    """Return the number of each seed at a position."""
    return uniforms(seed_tensor(list(seeds), HOST), position)[0]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63, 2**64 - 1, 12345678901234567890])
@pytest.mark.parametrize("position", [0, 1, 1000])
def test_uniforms_are_splitmix64(seed: int, position: int) -> None:
    bits = splitmix64((splitmix64(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64)
    number = (bits >> 40) / 2**24
    assert uniforms(seed_tensor([seed], HOST), position).item() == number
    assert uniforms(seed_tensor([seed], HOST), position - 3, 8)[3].item() == number


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    over_seeds = numbers_of(range(65536), 3)
    one = seed_tensor([7], HOST)
    over_positions = uniforms(one, 0, 4096)[:, 0]
    for numbers in (over_seeds, over_positions):
        counts = torch.histc(numbers, bins=64, min=0, max=1)
        # 63 degrees of freedom: 120 is exceeded with a probability of 2e-5.
        assert chi_square(counts, torch.full((64,), len(numbers) / 64)) < 120
        assert numbers.min() >= 0
        assert numbers.max() < 1


def test_uniforms_of_neighboring_seeds_and_positions_are_unrelated() -> None:
    table = uniforms(seed_tensor(range(4096), HOST), 0, 4)
    for other in (table[1], table[0].roll(1), table[3].roll(-1)):
        correlation = torch.corrcoef(torch.stack([table[0], other]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(4096)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5, -0.5])
    tokens, log_probs = draw_many(logits, 50_000, SamplingParams(max_new_tokens=1, temperature=temperature))
    probs = torch.softmax(logits / temperature, dim=-1)
    # 5 degrees of freedom: 30 is exceeded with a probability of 2e-5.
    assert chi_square(torch.bincount(tokens, minlength=6), probs * 50_000) < 30
    torch.testing.assert_close(log_probs, probs.log()[tokens], rtol=0, atol=1e-6)


def test_top_k_keeps_the_likeliest_in_proportion() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, 1.5])
    params = SamplingParams(max_new_tokens=1, top_k=3)
    tokens, log_probs = draw_many(logits, 20_000, params)
    assert set(tokens.tolist()) == {1, 3, 4}
    kept = torch.softmax(logits[[1, 3, 4]], dim=-1)
    assert chi_square(torch.bincount(tokens, minlength=5)[[1, 3, 4]], kept * 20_000) < 22
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1)[tokens], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.05, {2}), (0.5, {2}), (0.51, {2, 0}), (0.8, {2, 0}), (0.95, {2, 0, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.3, 0.05, 0.5, 0.15]).log()
    tokens, log_probs = draw_many(logits, 4_000, SamplingParams(max_new_tokens=1, top_p=top_p))
    assert set(tokens.tolist()) == kept
    torch.testing.assert_close(log_probs, logits[tokens], rtol=0, atol=1e-6)


def test_top_p_applies_to_what_top_k_leaves() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two that are left, the first holds 4/7.
    tokens, _ = draw_many(logits, 2_000, SamplingParams(max_new_tokens=1, top_k=2, top_p=0.5))
    assert set(tokens.tolist()) == {0}


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    tokens, _ = draw_many(torch.zeros(4), 500, SamplingParams(max_new_tokens=1, top_k=100))
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_temperature_zero_takes_the_likeliest_and_reports_temperature_one() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9])
    tokens, log_probs = draw_many(logits, 100, SamplingParams(max_new_tokens=1, temperature=0))
    assert set(tokens.tolist()) == {1}
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, -1)[tokens], rtol=0, atol=1e-6)


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for params in (SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=1, top_p=0.99)):
        assert set(draw_many(logits, 20_000, params)[0].tolist()) == {1, 3}


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-24])
def test_the_ends_of_the_unit_interval_stay_inside(number: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(512, 1000, generator=generator)
    weights[:, 0] = weights[:, -1] = 0
    index = sampling._inverse_cdf(weights, torch.full((512,), number))
    assert (weights.gather(1, index[:, None]) > 0).all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=1, temperature=0),
        SamplingParams(max_new_tokens=1, top_k=3),
        SamplingParams(max_new_tokens=1, temperature=0.7, top_p=0.9),
    ],
)
def test_forbidden_tokens_are_not_drawn_however_likely(params: SamplingParams) -> None:
    logits = torch.tensor([0.0, 30.0, 1.0, 2.0, 30.0])
    forbidden = torch.tensor([1, 4])
    prefix = torch.zeros(10_000, dtype=torch.int64)
    tokens, log_probs = draw(logits[None], prefix, numbers_of(range(10_000), 0), params, forbidden)
    assert set(tokens.tolist()) <= {0, 2, 3}
    left = torch.log_softmax(logits[[0, 2, 3]] / (params.temperature or 1), -1)
    expected = torch.full((5,), torch.nan).index_copy(0, torch.tensor([0, 2, 3]), left)
    torch.testing.assert_close(log_probs, expected[tokens])


def test_samples_that_share_a_prefix_share_its_distribution() -> None:
    logits = torch.tensor([[0.0, -50.0], [-50.0, 0.0]])
    tokens, _ = draw(
        logits, torch.tensor([1, 0, 1, 1]), numbers_of(range(4), 0), SamplingParams(max_new_tokens=1)
    )
    assert tokens.tolist() == [1, 0, 1, 1]


def test_a_large_vocabulary_is_drawn_from_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    arguments = (logits, torch.arange(100) % 5, numbers_of(range(100), 2))
    whole = draw(*arguments, SamplingParams(max_new_tokens=1, top_p=0.9))
    monkeypatch.setattr(sampling, "_MAX_ELEMENTS", 40 * 7)
    parts = draw(*arguments, SamplingParams(max_new_tokens=1, top_p=0.9))
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_low_precision_logits_are_widened_first() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    tokens, log_probs = draw_many(logits, 200, SamplingParams(max_new_tokens=1, temperature=0.7))
    assert log_probs.dtype == torch.float32
    expected = torch.log_softmax(logits.to(torch.float64) / 0.7, dim=-1)[tokens]
    torch.testing.assert_close(log_probs.to(torch.float64), expected, rtol=0, atol=1e-5)
