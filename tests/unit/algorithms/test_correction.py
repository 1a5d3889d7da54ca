"""Corrections against loops over tokens, at extreme ratios, and in however many micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anygauge.algorithms.correction import (
    Level,
    icepop,
    metrics_only,
    mis,
    rejection,
    sequence_mask,
    tis,
    veto,
)
from anygauge_hooks.algorithms import Correction
from anygauge_hooks.engines import LossInputs

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")
Rows = list[tuple[float, ...]]
"""Rows of a sample, by token: old, rollout and current log-prob, advantage, mask."""
ALL: dict[str, Callable[[LossInputs], Correction]] = {
    **{f"tis-{level}": partial(tis, level=level, low=0.5, high=1.5) for level in LEVELS},
    **{f"mis-{level}": partial(mis, level=level, low=0.5, high=1.5) for level in LEVELS},
    **{f"rejection-{level}": partial(rejection, level=level, low=0.7, high=1.3) for level in LEVELS},
    "icepop": icepop,
    "veto": partial(veto, threshold=0.4),
    "sequence_mask": partial(sequence_mask, delta=0.05),
    "metrics_only": metrics_only,
}


def make_inputs(
    lengths: Sequence[int], seed: int = 0, spread: float = 0.5, dtype: torch.dtype = torch.float64
) -> LossInputs:
    """Return whole samples, a third of whose tokens do not count; those hold 0, as a loss sees them."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    mask = (torch.rand(size, generator=generator) > 0.3).double()

    def draw(scale: float, mean: float = 0.0) -> Tensor:
        return ((torch.randn(size, generator=generator).double() * scale + mean) * mask).to(dtype)

    old = draw(1.0, -3.0)
    return LossInputs(
        log_probs=(old + draw(spread)).requires_grad_(),
        entropy=draw(1.0).abs(),
        old_log_probs=old,
        rollout_log_probs=old + draw(spread),
        reference_log_probs=None,
        advantages=draw(1.0),
        loss_mask=mask.to(dtype),
        loss_weights=(mask / mask.sum().clamp(min=1)).to(dtype),
        samples=range(len(lengths)),
        lengths=lengths,
    )


def of_tokens(ratios: Sequence[float], lengths: Sequence[int] | None = None, **changes: Any) -> LossInputs:
    """Return tokens that all count, with given ratios of old to rollout."""
    size = len(ratios)
    log_ratios = torch.tensor([math.log(each) for each in ratios], dtype=torch.float64)
    old = torch.full((size,), -1.0, dtype=torch.float64)
    values: dict[str, Any] = {
        "log_probs": old.clone().requires_grad_(),
        "entropy": old,
        "old_log_probs": old,
        "rollout_log_probs": old - log_ratios,
        "reference_log_probs": None,
        "advantages": torch.ones_like(old),
        "loss_mask": torch.ones_like(old),
        "loss_weights": torch.full_like(old, 1 / size),
        "lengths": lengths or [size],
        "samples": range(len(lengths or [size])),
    }
    return LossInputs(**(values | changes))


def by_sample(inputs: LossInputs) -> list[LossInputs]:
    """Return a micro-batch for each sample."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    parts = {
        name: torch.split(each, list(inputs.lengths))
        for name, each in values.items()
        if isinstance(each, Tensor)
    }
    return [
        replace(
            inputs,
            **{name: part[i] for name, part in parts.items()},
            samples=[s],
            lengths=[inputs.lengths[i]],
        )
        for i, s in enumerate(inputs.samples)
    ]


def rows(inputs: LossInputs) -> list[Rows]:
    columns = (inputs.old_log_probs, inputs.rollout_log_probs, inputs.log_probs)
    table = zip(*(each.tolist() for each in (*columns, inputs.advantages, inputs.loss_mask)), strict=True)
    tokens = list(table)
    found, first = [], 0
    for length in inputs.lengths:
        found.append(tokens[first : first + length])
        first += length
    return found


# -------------------------------------------------------------------------
# The formulas, token by token
# -------------------------------------------------------------------------


def slow_ratios(sample: Rows, level: Level) -> list[float]:
    logs = [old - rollout for old, rollout, _, _, mask in sample if mask]
    if level == "token":
        return [math.exp(old - rollout) if mask else 1.0 for old, rollout, _, _, mask in sample]
    whole = math.exp(sum(logs))
    geometric = whole ** (1 / len(logs)) if logs else 1.0
    return [whole if level == "sequence" else geometric] * len(sample)


def slow(name: str, sample: Rows, level: Level) -> list[float]:
    """Return the weights of one sample."""
    ratios = slow_ratios(sample, level)
    match name:
        case "tis":
            return [min(max(ratio, 0.5), 1.5) for ratio in ratios]
        case "mis":
            return [ratio if 0.5 <= ratio <= 1.5 else 0.0 for ratio in ratios]
        case "icepop":
            return [ratio if 0.5 <= ratio <= 5.0 else 0.0 for ratio in slow_ratios(sample, "token")]
        case "rejection":
            return [1.0 if 0.7 <= ratio <= 1.3 else 0.0 for ratio in ratios]
        case "veto":
            kept = all(ratio >= 0.4 for ratio in slow_ratios(sample, "token"))
            return [float(kept)] * len(sample)
        case "sequence_mask":
            gone = [rollout - current for _, rollout, current, _, mask in sample if mask]
            is_far = bool(gone) and sum(gone) / len(gone) > 0.05
            return [0.0 if advantage < 0 and is_far else 1.0 for *_, advantage, _ in sample]
    raise AssertionError(name)


@settings(max_examples=15)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_every_weight_is_that_of_a_loop_over_tokens(lengths: list[int], seed: int) -> None:
    inputs = make_inputs(lengths, seed)
    for key, function in ALL.items():
        name, _, level = key.partition("-")
        weights = function(inputs).importance_weights
        if weights is not None:
            expected = [value for sample in rows(inputs) for value in slow(name, sample, level or "token")]  # type: ignore[arg-type]
            assert weights.tolist() == pytest.approx(expected, rel=1e-10), key


@settings(max_examples=15)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_metrics_only_is_that_of_a_loop_over_tokens(lengths: list[int], seed: int) -> None:
    inputs = make_inputs(lengths, seed)
    found = metrics_only(inputs)
    metrics = {**found.metrics, **found.sample_metrics}
    expected: dict[str, list[float]] = {name: [] for name in metrics}
    for sample in rows(inputs):
        for ratio, whole, geometric in zip(*(slow_ratios(sample, level) for level in LEVELS), strict=True):
            expected["kl"].append(-math.log(ratio))
            expected["kl_k3"].append(ratio - 1 - math.log(ratio))
            expected["chi2_token"].append(ratio**2 - 1)
            expected["chi2_sequence"].append(whole**2 - 1)
            expected["ppl_ratio"].append(1 / geometric)
    assert found.importance_weights is None
    for name, values in expected.items():
        assert metrics[name].tolist() == pytest.approx(values, rel=1e-9, abs=1e-12), name


def test_by_hand() -> None:
    inputs = of_tokens([4.0, 0.25, 1.0, 3.0, 0.5, 0.5], lengths=[3, 3])
    expected = {
        "tis": (tis(inputs), [2.0, 0.25, 1.0, 2.0, 0.5, 0.5]),
        "tis of sequences": (tis(inputs, level="sequence"), [1.0] * 3 + [0.75] * 3),
        "icepop": (icepop(inputs), [4.0, 0.0, 1.0, 3.0, 0.5, 0.5]),
        "mis": (mis(inputs, high=0.9), [0.0] * 3 + [0.75] * 3),
        "mis of tokens": (mis(inputs, level="token"), [0.0, 0.25, 1.0, 0.0, 0.5, 0.5]),
        "mis of means": (mis(inputs, level="geometric", low=0.99), [1.0] * 3 + [0.0] * 3),
        "rejection": (rejection(inputs, level="sequence", low=0.5, high=0.8), [0.0] * 3 + [1.0] * 3),
        "veto": (veto(inputs, threshold=0.3), [0.0] * 3 + [1.0] * 3),
    }
    for name, (found, weights) in expected.items():
        assert found.importance_weights is not None
        assert found.importance_weights.tolist() == pytest.approx(weights), name
    assert tis(inputs).metrics["clipped"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_bounds_belong_to_what_is_kept() -> None:
    inputs = of_tokens([0.5, 2.0])
    kept = rejection(inputs, level="token", low=math.exp(math.log(0.5)), high=math.exp(math.log(2.0)))
    assert kept.importance_weights is not None
    assert kept.importance_weights.tolist() == [1.0, 1.0]


def test_a_sequence_is_masked_where_it_went_wrong_and_the_policy_has_left_it() -> None:
    far, near = -0.5, -0.01
    inputs = of_tokens([1.0] * 6, lengths=[2, 2, 2])
    inputs = replace(
        inputs,
        log_probs=inputs.rollout_log_probs + torch.tensor([far, far, far, far, near, near]),
        advantages=torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0, -1.0]),
    )
    weights = sequence_mask(inputs, delta=0.1).importance_weights
    assert weights is not None
    assert weights.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


# -------------------------------------------------------------------------
# Properties of all of them
# -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_policy_that_sampled_itself_is_not_corrected(name: str) -> None:
    inputs = make_inputs([3, 1, 4], spread=0.0)
    found = ALL[name](inputs)
    assert found.importance_weights is None or found.importance_weights.eq(1).all()
    wanted = {"ppl_ratio": 1.0}
    assert all(
        value.eq(wanted.get(key, 0.0)).all()
        for key, value in {**found.metrics, **found.sample_metrics}.items()
    )


@pytest.mark.parametrize("name", ALL)
def test_each_sample_alone_in_any_order_gives_the_same(name: str) -> None:
    inputs = make_inputs([4, 1, 7, 3], seed=5)
    whole = ALL[name](inputs)
    parts = [ALL[name](part) for part in by_sample(inputs)]
    order = [2, 0, 3, 1]
    singles = by_sample(inputs)
    joined = {
        field.name: torch.cat([getattr(singles[i], field.name) for i in order])
        for field in fields(inputs)
        if isinstance(getattr(inputs, field.name), Tensor)
    }
    lengths = [inputs.lengths[i] for i in order]
    shuffled = ALL[name](replace(inputs, **joined, samples=order, lengths=lengths))
    for key in (None, *{**whole.metrics, **whole.sample_metrics}):
        tensors = [
            each.importance_weights if key is None else {**each.metrics, **each.sample_metrics}[key]
            for each in (whole, *parts, shuffled)
        ]
        if tensors[0] is None:
            continue
        expected, *alone, mixed = (each for each in tensors if each is not None)
        assert torch.equal(torch.cat(alone), expected)
        back = dict(zip(order, mixed.split(lengths), strict=True))
        assert torch.equal(torch.cat([back[i] for i in range(4)]), expected)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("old", "rollout"), [(-500.0, -1e-9), (-1e-9, -500.0), (-1.0, -math.inf), (-1e30, 0.0), (0.0, -1e30)]
)
def test_an_extreme_ratio_stays_finite(name: str, dtype: torch.dtype, old: float, rollout: float) -> None:
    inputs = make_inputs([3, 2], spread=0.0, dtype=dtype)
    changed = replace(
        inputs,
        log_probs=inputs.log_probs.detach().index_fill(0, torch.tensor([1]), old),
        old_log_probs=inputs.old_log_probs.index_fill(0, torch.tensor([1, 2]), old),
        rollout_log_probs=inputs.rollout_log_probs.index_fill(0, torch.tensor([1]), rollout),
    )
    found = ALL[name](changed)
    for value in (found.importance_weights, *found.metrics.values(), *found.sample_metrics.values()):
        assert value is None or value.isfinite().all()


@pytest.mark.parametrize("name", [name for name in ALL if name != "metrics_only"])
def test_tokens_that_do_not_count_change_no_weight_of_those_that_do(name: str) -> None:
    """Put a tool's answer between two turns: the sample's ratio is that of the policy's own tokens."""
    inputs = make_inputs([5, 5], seed=2)
    counts = inputs.loss_mask != 0
    assert 0 < int(counts.sum()) < 10
    kept = {
        field.name: getattr(inputs, field.name)[counts]
        for field in fields(inputs)
        if isinstance(getattr(inputs, field.name), Tensor)
    }
    lengths = [int(part.sum()) for part in counts.split(5)]
    alone, whole = (
        ALL[name](replace(inputs, **kept, lengths=lengths)).importance_weights,
        ALL[name](inputs).importance_weights,
    )
    assert alone is not None
    assert whole is not None
    assert whole[counts].tolist() == pytest.approx(alone.tolist(), rel=1e-12)


@pytest.mark.parametrize("name", ["tis-token", "mis-token", "icepop"])
def test_a_ratio_that_is_no_number_is_not_hidden(name: str) -> None:
    inputs = of_tokens([1.0, 1.0])
    broken = replace(inputs, rollout_log_probs=torch.tensor([math.nan, -1.0], dtype=torch.float64))
    weights = ALL[name](broken).importance_weights
    assert weights is not None
    assert weights.isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", ["tis-sequence", "mis-geometric", "veto", "sequence_mask"])
def test_whole_samples_need_their_lengths(name: str) -> None:
    with pytest.raises(AssertionError, match="whole samples needs their lengths"):
        ALL[name](replace(make_inputs([3]), lengths=()))


# -------------------------------------------------------------------------
# What they are for
# -------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3])
def test_the_bias_of_another_policys_samples_is_corrected(length: int) -> None:
    """A bandit whose gradient is known: the expectation over what the engine samples, by enumeration.

    The engine draws each token of a response of ``length`` from ``q``, the trainer has ``p``, and the reward
    is that of a table. The gradient of the trainer's expected reward is ``E_p[r * d log p]``; uncorrected
    samples give ``E_q[r * d log p]``.
    """
    arms = 3
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    engine = torch.log_softmax(torch.tensor([-0.6, 0.4, 0.1], dtype=torch.float64), 0)
    responses = torch.cartesian_prod(*[torch.arange(arms)] * length).reshape(-1, length)
    rewards = torch.linspace(-1, 2, len(responses), dtype=torch.float64).sin()

    def expected(correct: Callable[[LossInputs], Correction] | None) -> Tensor:
        """Return the gradient that samples of the engine give, each weighed by its probability there."""
        policy = torch.log_softmax(logits, 0)
        own, theirs = policy[responses].flatten(), engine[responses].flatten()
        chances = engine[responses].sum(1).exp().repeat_interleave(length)
        inputs = LossInputs(
            log_probs=own,
            entropy=own,
            old_log_probs=own.detach(),
            rollout_log_probs=theirs,
            reference_log_probs=None,
            advantages=rewards.repeat_interleave(length),
            loss_mask=torch.ones_like(theirs),
            loss_weights=chances,
            samples=range(len(responses)),
            lengths=[length] * len(responses),
        )
        weights: Tensor | float | None = 1.0 if correct is None else correct(inputs).importance_weights
        assert weights is not None
        (gradient,) = torch.autograd.grad((inputs.advantages * own * weights * chances).sum(), logits)
        return gradient

    policy = torch.log_softmax(logits, 0)
    true = torch.autograd.grad((policy[responses].sum(1).exp() * rewards).sum(), logits)[0]
    off = (expected(None) - true).norm().item()
    assert off > 0.05 * true.norm().item()
    for whole in (partial(tis, level="sequence", high=100.0), partial(mis, high=100.0)):
        torch.testing.assert_close(expected(whole), true, rtol=1e-12, atol=1e-14)
    # bounds trade some of the bias back for variance, and tokens alone know nothing of what came before
    for bounded in (partial(tis, level="sequence", high=1.3), partial(tis, level="token")):
        assert (expected(bounded) - true).norm().item() < off


def test_a_sampled_bandit_learns_the_better_arm_only_if_corrected() -> None:
    """The engine prefers a good arm so much that, uncorrected, the best one falls behind it."""
    rewards, engine = torch.tensor([1.0, 0.9, 0.0]), torch.log_softmax(torch.tensor([-1.5, 1.5, 0.0]), 0)

    def trained(correct: Callable[[LossInputs], Correction] | None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        logits = torch.zeros(3, requires_grad=True)
        for _ in range(60):
            arms = torch.multinomial(engine.exp(), 512, replacement=True, generator=generator)
            own = torch.log_softmax(logits, 0)[arms]
            inputs = LossInputs(
                log_probs=own,
                entropy=own,
                old_log_probs=own.detach(),
                rollout_log_probs=engine[arms],
                reference_log_probs=None,
                advantages=rewards[arms],
                loss_mask=torch.ones(512),
                loss_weights=torch.full((512,), 1 / 512),
                samples=range(512),
                lengths=[1] * 512,
            )
            weights = torch.ones(512) if correct is None else correct(inputs).importance_weights
            (gradient,) = torch.autograd.grad((own * rewards[arms] * weights).mean(), logits)
            logits = (logits + gradient).detach().requires_grad_()
        return torch.softmax(logits, 0).detach()

    assert trained(None).argmax() == 1
    for correct in (partial(tis, high=50.0), partial(mis, high=50.0), partial(icepop, low=0.0, high=50.0)):
        assert trained(correct).argmax() == 0
