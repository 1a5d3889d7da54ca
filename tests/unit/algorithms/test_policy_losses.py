"""GSPO, CISPO and REINFORCE against loops over tokens, and the losses of a critic and of distillation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anygauge.algorithms.advantages import dr_grpo, rloo
from anygauge.algorithms.aggregation import token_weights
from anygauge.algorithms.kl import top_k_kl
from anygauge.algorithms.losses import bind_options, cispo, gspo, policy_gradient, policy_objective
from anygauge.algorithms.values import value_loss
from anygauge_hooks.algorithms import ValueInputs
from anygauge_hooks.engines import LossInputs

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def make_tokens(lengths: Sequence[int], seed: int = 0) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def draw(scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * scale

    mask = (torch.rand(size, generator=generator) > 0.3).double()
    old = draw() - 3
    return LossInputs(
        log_probs=(old + draw(0.4)).requires_grad_(),
        entropy=draw().abs(),
        old_log_probs=old,
        rollout_log_probs=old,
        reference_log_probs=None,
        advantages=draw(),
        loss_mask=mask,
        loss_weights=mask / mask.sum().clamp(min=1),
        samples=range(len(lengths)),
        lengths=lengths,
    )


def gradient(loss: Tensor, inputs: LossInputs) -> list[float]:
    return torch.autograd.grad(loss, inputs.log_probs)[0].tolist()


def clamp(value: float) -> float:
    return min(max(value, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])


@settings(max_examples=40)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_gspo_has_one_ratio_for_each_sample(lengths: list[int], seed: int) -> None:
    inputs = make_tokens(lengths, seed)
    loss, metrics = gspo(inputs, **CLIP)
    expected = ratios = 0.0
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        start += length
        rows = list(
            zip(
                (inputs.log_probs - inputs.old_log_probs)[own].tolist(),
                inputs.loss_mask[own].tolist(),
                inputs.advantages[own].tolist(),
                inputs.loss_weights[own].tolist(),
                strict=True,
            )
        )
        count = sum(mask for _, mask, _, _ in rows)
        ratio = math.exp(sum(d * mask for d, mask, _, _ in rows) / count) if count else 1.0
        expected += sum(-min(ratio * a, clamp(ratio) * a) * weight for _, _, a, weight in rows)
        ratios += sum(ratio * weight for *_, weight in rows)
    assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert metrics["ratio"].item() == pytest.approx(ratios, rel=1e-10, abs=1e-12)


def test_gspo_by_hand() -> None:
    """Two tokens of one sample with opposite advantages, on policy: each is pulled its own way."""
    inputs = replace(
        make_tokens([2]),
        log_probs=torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True),
        old_log_probs=torch.tensor([-1.0, -2.0], dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        loss_mask=torch.ones(2, dtype=torch.float64),
        loss_weights=torch.full((2,), 0.5, dtype=torch.float64),
    )
    loss, _ = gspo(inputs, **CLIP)
    assert gradient(loss, inputs) == [-0.5, 0.5]


@settings(max_examples=20)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_each_token_pulls_at_the_ratio_of_gspo_by_its_own_advantage(lengths: list[int], seed: int) -> None:
    inputs = make_tokens(lengths, seed)
    loss, _ = gspo(inputs, **CLIP)
    columns = (
        inputs.log_probs - inputs.old_log_probs,
        inputs.loss_mask,
        inputs.advantages,
        inputs.loss_weights,
    )
    expected: list[float] = []
    for rows in zip(*(torch.split(each, lengths) for each in columns), strict=True):
        logs, mask, advantages, weights = (each.tolist() for each in rows)
        ratio = math.exp(sum(d * m for d, m in zip(logs, mask, strict=True)) / max(sum(mask), 1))
        for a, weight in zip(advantages, weights, strict=True):
            is_clipped = ratio * a > clamp(ratio) * a
            expected.append(0.0 if is_clipped else -ratio * a * weight)
    assert gradient(loss, inputs) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean"])
def test_with_one_advantage_per_sample_gspo_is_equation_5(mode: Any) -> None:
    """Value and gradient are those of a ratio that depends on every token of its sample."""
    lengths = [3, 4, 6]
    inputs = make_tokens(lengths, seed=4)
    weights = token_weights(inputs.loss_mask, lengths, mode)
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    inputs = replace(inputs, advantages=advantages, loss_weights=weights)
    log_ratios = (inputs.log_probs - inputs.old_log_probs) * inputs.loss_mask
    rows = zip(torch.split(log_ratios, lengths), torch.split(inputs.loss_mask, lengths), strict=True)
    ratios = torch.cat([(logs.sum() / mask.sum()).exp().expand(len(mask)) for logs, mask in rows])
    surrogate = torch.minimum(ratios * advantages, ratios.clamp(1 - 0.2, 1 + 0.28) * advantages)
    expected = -(surrogate * weights).sum()
    loss, _ = gspo(inputs, **CLIP)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert gradient(loss, inputs) == pytest.approx(gradient(expected, inputs), rel=1e-12, abs=1e-15)


@settings(max_examples=40)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_cispo_weighs_the_gradient_of_every_token(lengths: list[int], seed: int) -> None:
    inputs = make_tokens(lengths, seed)
    loss, metrics = cispo(inputs, **CLIP)
    rows = list(
        zip(
            inputs.log_probs.tolist(),
            inputs.old_log_probs.tolist(),
            inputs.advantages.tolist(),
            inputs.loss_weights.tolist(),
            strict=True,
        )
    )
    weights = [clamp(math.exp(new - old)) for new, old, _, _ in rows]
    terms = [-w * a * new * share for w, (new, _, a, share) in zip(weights, rows, strict=True)]
    assert loss.item() == pytest.approx(sum(terms), rel=1e-10, abs=1e-12)
    slopes = [-w * a * share for w, (_, _, a, share) in zip(weights, rows, strict=True)]
    assert gradient(loss, inputs) == pytest.approx(slopes, rel=1e-10, abs=1e-12)
    clipped = sum(s for w, (new, old, _, s) in zip(weights, rows, strict=True) if w != math.exp(new - old))
    assert metrics["pg_clipfrac"].item() == pytest.approx(clipped)


def test_policy_gradient_is_reinforce() -> None:
    inputs = make_tokens([5])
    loss, _ = policy_gradient(inputs)
    assert loss.item() == pytest.approx(
        -(inputs.advantages * inputs.log_probs * inputs.loss_weights).sum().item()
    )
    assert gradient(loss, inputs) == pytest.approx((-inputs.advantages * inputs.loss_weights).tolist())


@pytest.mark.parametrize("name", ["gspo", "cispo", "policy_gradient"])
def test_a_loss_does_not_depend_on_the_split(name: str) -> None:
    lengths = [4, 1, 7, 3]
    inputs = make_tokens(lengths)
    function = bind_options({"gspo": gspo, "cispo": cispo, "policy_gradient": policy_gradient}[name], **CLIP)
    loss, metrics = function(inputs)
    parts = [function(part) for part in by_sample(inputs)]
    total = torch.stack([each for each, _ in parts]).sum()
    torch.testing.assert_close(total, loss, rtol=1e-13, atol=1e-13)
    assert gradient(total, inputs) == pytest.approx(gradient(loss, inputs), rel=1e-12, abs=1e-14)
    for key, value in metrics.items():
        added = torch.stack([reported[key] for _, reported in parts]).sum()
        torch.testing.assert_close(added, value, rtol=1e-12, atol=1e-13)


def by_sample(inputs: LossInputs) -> list[LossInputs]:
    """Return each sample as a micro-batch of its own."""
    names = [f.name for f in fields(inputs) if isinstance(getattr(inputs, f.name), Tensor)]
    cut = {name: getattr(inputs, name).split(list(inputs.lengths)) for name in names}
    result = []
    for number, length in enumerate(inputs.lengths):
        values: dict[str, Any] = {name: parts[number] for name, parts in cut.items()}
        result.append(replace(inputs, **values, samples=[number], lengths=[length]))
    return result


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("function", [gspo, cispo], ids=["gspo", "cispo"])
def test_masked_tokens_of_a_ratio_may_hold_anything(function: Any, poison: float) -> None:
    inputs = make_tokens([6, 6])
    masked = inputs.loss_mask == 0
    assert masked.any()
    dirty = replace(inputs, log_probs=inputs.log_probs.detach().masked_fill(masked, poison).requires_grad_())
    objective = policy_objective(partial(function, **CLIP))
    assert objective(dirty)[0].item() == objective(inputs)[0].item() == function(inputs, **CLIP)[0].item()


@settings(max_examples=40)
@given(rewards=st.lists(st.floats(-100, 100), min_size=1, max_size=9))
def test_rloo_leaves_one_out(rewards: list[float]) -> None:
    count = len(rewards)
    others = [(sum(rewards) - own) / (count - 1) if count > 1 else own for own in rewards]
    expected = [own - other for own, other in zip(rewards, others, strict=True)]
    found = rloo(torch.tensor(rewards, dtype=torch.float64)).tolist()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_dr_grpo_only_centers() -> None:
    assert dr_grpo(torch.tensor([0.0, 1.0, 5.0])).tolist() == [-2.0, -1.0, 3.0]


def test_constant_length_counts_every_token_alike() -> None:
    weights = token_weights(torch.tensor([1, 1, 1, 0, 1, 0, 0]), [3, 2, 2], "constant_length", 10)
    assert weights.tolist() == [0.05, 0.05, 0.05, 0.0, 0.05, 0.0, 0.0]


def make_values(size: int, seed: int = 0) -> ValueInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    mask = (torch.rand(size, generator=generator) > 0.3).double()
    return ValueInputs(
        values=draw().masked_fill(mask == 0, math.nan).requires_grad_(),
        old_values=draw(),
        returns=draw(),
        loss_mask=mask,
        loss_weights=mask / mask.sum().clamp(min=1),
    )


@settings(max_examples=40)
@given(size=st.integers(1, 20), seed=st.integers(0, 9), clip=st.sampled_from([None, 0.2, 1.0]))
def test_the_value_loss_is_the_larger_error(size: int, seed: int, clip: float | None) -> None:
    inputs = make_values(size, seed)
    loss, metrics = value_loss(inputs, clip=clip)
    expected = clipped = 0.0
    for value, old, target, weight in zip(
        inputs.values.tolist(),
        inputs.old_values.tolist(),
        inputs.returns.tolist(),
        inputs.loss_weights.tolist(),
        strict=True,
    ):
        if not weight:
            continue
        error = (value - target) ** 2
        if clip is not None:
            bounded = (old + min(max(value - old, -clip), clip) - target) ** 2
            clipped += weight * (abs(value - old) > clip and bounded > error)
            error = max(error, bounded)
        expected += error * weight / 2
    assert loss.item() == pytest.approx(expected)
    assert metrics["value_loss"].item() == loss.item()
    assert metrics.get("value_clipfrac", torch.zeros(())).item() == pytest.approx(clipped)
    (slope,) = torch.autograd.grad(loss, inputs.values)
    assert slope.isfinite().all()


def test_top_k_kl_of_the_whole_vocabulary_is_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, teacher = (
        torch.randn(4, 9, generator=generator, dtype=torch.float64).log_softmax(1) for _ in range(2)
    )
    exact = (teacher.exp() * (teacher - policy)).sum(1)
    torch.testing.assert_close(top_k_kl(policy, teacher), exact, rtol=1e-9, atol=1e-9)
    ids = teacher.topk(3, dim=1).indices
    best, few = (
        torch.cat((x.gather(1, ids), x.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)), 1)
        for x in (teacher, policy)
    )
    found = top_k_kl(few, best)
    assert (found >= 0).all()
    assert (found < exact).all()
    assert top_k_kl(best, best).abs().max() < 1e-12
    few.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: top_k_kl(x, best), (few,))


def test_what_is_distilled_is_a_mean_over_the_tokens_that_count() -> None:
    inputs = make_tokens([3, 4])
    generator = torch.Generator().manual_seed(1)
    policy, teacher = (
        torch.randn(7, 9, generator=generator).double().log_softmax(1)[:, :4] for _ in range(2)
    )
    counts = inputs.loss_mask.bool()
    expected = (top_k_kl(policy, teacher) * inputs.loss_weights).sum()
    hidden = {
        "top_k_log_probs": policy.masked_fill(~counts[:, None], torch.nan),
        "teacher_top_k_log_probs": teacher.masked_fill(~counts[:, None], torch.inf),
    }
    plain = policy_objective(policy_gradient)(inputs)[0]
    loss, metrics = policy_objective(policy_gradient, distill_kl_coef=0.5)(replace(inputs, **hidden))
    torch.testing.assert_close(metrics["distill_kl"], expected)
    torch.testing.assert_close(loss, plain + 0.5 * expected)
