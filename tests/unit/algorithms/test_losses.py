"""Policy losses: hand-computed values, gradients, split invariance and masked tokens."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.algorithms.losses import bind_options, policy_objective, ppo_clip, sft
from anygauge_hooks.engines import LossFunction, LossInputs
from anygauge_hooks.errors import PluginError

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
OBJECTIVE = policy_objective(
    bind_options(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    kl_coef=0.1,
    kl_type="k3",
    entropy_coef=0.01,
)


def tokens(ratios: Sequence[float], advantages: Sequence[float], **changes: Tensor) -> LossInputs:
    """Return tokens with given ratios, all of which count and weigh the same."""
    size = len(ratios)
    old = torch.full((size,), -1.0, dtype=torch.float64)
    values: dict[str, Tensor | None] = {
        "log_probs": old + torch.tensor(ratios, dtype=torch.float64).log(),
        "entropy": torch.full((size,), 2.0, dtype=torch.float64),
        "old_log_probs": old,
        "rollout_log_probs": old - 0.5,
        "reference_log_probs": None,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "loss_mask": torch.ones(size, dtype=torch.float64),
        "loss_weights": torch.full((size,), 1 / size, dtype=torch.float64),
    }
    return LossInputs(**(values | changes))  # type: ignore[arg-type]


def random_tokens(size: int, *, dtype: torch.dtype = torch.float64) -> LossInputs:
    """Return tokens with ratios around 1, a fifth of which do not count."""
    generator = torch.Generator().manual_seed(size)

    def draw(scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).mul(scale).to(dtype)

    mask = (torch.rand(size, generator=generator) > 0.2).to(dtype)
    old = draw() - 3
    return LossInputs(
        log_probs=old + draw(0.3),
        entropy=draw().abs(),
        old_log_probs=old,
        rollout_log_probs=old + draw(0.01),
        reference_log_probs=old + draw(0.3),
        advantages=draw(),
        loss_mask=mask,
        loss_weights=mask / mask.sum(),
    )


def tensors(inputs: LossInputs) -> dict[str, Tensor]:
    """Return the fields that have one value per token."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def per_token(inputs: LossInputs, keep: Tensor) -> LossInputs:
    """Return the tokens of a micro-batch."""
    values: dict[str, Any] = {name: tensor[keep] for name, tensor in tensors(inputs).items()}
    return LossInputs(**values)


def test_loss_at_ratio_one_is_minus_the_mean_advantage() -> None:
    loss, metrics = ppo_clip(tokens([1.0, 1.0], [1.0, -3.0]), **CLIP)
    assert loss.item() == 1.0
    assert metrics["pg_clipfrac"].item() == 0.0
    assert metrics["ratio"].item() == 1.0
    assert metrics["ppo_kl"].item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.1, 1.0, -1.1, 0.0),
        (1.5, 1.0, -1.2, 1.0),
        (0.5, 1.0, -0.5, 0.0),
        (1.5, -1.0, 1.5, 0.0),
        (0.5, -1.0, 0.8, 1.0),
    ],
)
def test_clipping(ratio: float, advantage: float, expected: float, clipped: float) -> None:
    loss, metrics = ppo_clip(tokens([ratio], [advantage]), **CLIP)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert metrics["pg_clipfrac"].item() == clipped


def test_clip_higher_moves_the_upper_bound_only() -> None:
    inputs = tokens([1.5, 0.5], [1.0, -1.0])
    loss, _ = ppo_clip(inputs, clip_low=0.2, clip_high=0.28)
    assert loss.item() == pytest.approx((-1.28 + 0.8) / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "expected", "bounded"), [(2.0, 2.0, 0.0), (9.0, 3.0, 1.0), (1e30, 3.0, 1.0)]
)
def test_dual_clip_bounds_a_negative_advantage(ratio: float, expected: float, bounded: float) -> None:
    loss, metrics = ppo_clip(tokens([ratio], [-1.0]), dual_clip=3.0, **CLIP)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert metrics["pg_clipfrac_lower"].item() == bounded


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    inputs = tokens([0.1, 1.0, 9.0], [1.0, 2.0, 3.0])
    loss, metrics = ppo_clip(inputs, dual_clip=3.0, **CLIP)
    assert loss == ppo_clip(inputs, **CLIP)[0]
    assert metrics["pg_clipfrac_lower"].item() == 0.0


def test_a_clipped_token_has_no_gradient() -> None:
    inputs = tokens([1.5, 0.5, 1.0], [1.0, -1.0, 1.0])
    inputs.log_probs.requires_grad_()
    ppo_clip(inputs, **CLIP)[0].backward()
    assert inputs.log_probs.grad is not None
    assert inputs.log_probs.grad.tolist() == pytest.approx([0.0, 0.0, -1 / 3])


def test_metrics_compare_the_three_policies() -> None:
    _, metrics = ppo_clip(tokens([2.0, 1.0], [0.0, 0.0]), **CLIP)
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(2) / 2)
    assert metrics["train_rollout_logprob_abs_diff"].item() == pytest.approx(0.5)
    assert metrics["current_rollout_logprob_abs_diff"].item() == pytest.approx(0.5 + math.log(2) / 2)
    assert metrics["log_probs"].item() == pytest.approx(-1 + math.log(2) / 2)
    assert metrics["rollout_log_probs"].item() == pytest.approx(-1.5)
    assert metrics["rollout_kl"].item() == pytest.approx(math.exp(0.5) - 1 - 0.5)


def test_sft_is_the_negative_log_likelihood() -> None:
    inputs = tokens([1.0, math.e], [5.0, 5.0])
    loss, metrics = sft(inputs)
    assert loss.item() == pytest.approx(0.5)
    assert not metrics


def test_an_entropy_bonus_needs_an_entropy_with_a_gradient() -> None:
    inputs = random_tokens(8)
    inputs.log_probs.requires_grad_()
    with pytest.raises(AssertionError, match="an entropy bonus without gradient"):
        OBJECTIVE(inputs)
    with torch.no_grad():
        OBJECTIVE(inputs)
    policy_objective(sft)(inputs)


def test_objective_adds_kl_and_subtracts_entropy() -> None:
    inputs = tokens([1.0], [1.0], reference_log_probs=torch.tensor([-2.0], dtype=torch.float64))
    objective = policy_objective(partial(ppo_clip, **CLIP), kl_coef=0.5, kl_type="k1", entropy_coef=0.25)
    loss, metrics = objective(inputs)
    assert loss.item() == pytest.approx(-1.0 + 0.5 * 1.0 - 0.25 * 2.0)
    assert metrics["loss"].item() == loss.item()
    assert [metrics[name].item() for name in ("pg_loss", "kl_loss", "entropy_loss")] == [-1, 1, 2]


def test_objective_without_terms_needs_no_reference() -> None:
    loss, metrics = policy_objective(partial(ppo_clip, **CLIP))(tokens([1.0], [1.0]))
    assert loss.item() == -1.0
    assert "kl_loss" not in metrics


def test_kl_of_equal_policies_is_exactly_zero() -> None:
    inputs = random_tokens(64)
    _, metrics = OBJECTIVE(replace(inputs, reference_log_probs=inputs.log_probs))
    assert metrics["kl_loss"].item() == 0.0


@pytest.mark.parametrize(
    "loss", [partial(ppo_clip, **CLIP), sft, OBJECTIVE], ids=["ppo_clip", "sft", "objective"]
)
def test_gradient(loss: LossFunction) -> None:
    inputs = random_tokens(24)

    def scalar(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return loss(replace(inputs, log_probs=log_probs, entropy=entropy))[0]

    assert torch.autograd.gradcheck(
        scalar, (inputs.log_probs.requires_grad_(), inputs.entropy.requires_grad_())
    )


@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_does_not_depend_on_the_split(num_parts: int) -> None:
    inputs = random_tokens(97)
    inputs.log_probs.requires_grad_()
    inputs.entropy.requires_grad_()
    whole, whole_metrics = OBJECTIVE(inputs)
    (whole_grad,) = torch.autograd.grad(whole, inputs.log_probs, retain_graph=True)

    parts = [OBJECTIVE(per_token(inputs, torch.arange(97) % num_parts == part)) for part in range(num_parts)]
    total = torch.stack([loss for loss, _ in parts]).sum()
    (total_grad,) = torch.autograd.grad(total, inputs.log_probs)

    torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-13)
    assert torch.equal(total_grad, whole_grad)
    for name, value in whole_metrics.items():
        added = torch.stack([metrics[name] for _, metrics in parts]).sum()
        torch.testing.assert_close(added, value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_may_hold_anything(poison: float) -> None:
    inputs = random_tokens(32)
    masked = inputs.loss_mask == 0
    assert masked.any()
    poisoned: dict[str, Any] = {
        name: tensor.masked_fill(masked, poison)
        for name, tensor in tensors(inputs).items()
        if name != "loss_mask"
    }
    dirty = LossInputs(**poisoned, loss_mask=inputs.loss_mask)
    clean, dirty_log_probs = inputs.log_probs.requires_grad_(), dirty.log_probs.requires_grad_()
    inputs.entropy.requires_grad_()
    dirty.entropy.requires_grad_()
    clean_loss, clean_metrics = OBJECTIVE(inputs)
    dirty_loss, dirty_metrics = OBJECTIVE(dirty)
    clean_loss.backward()
    dirty_loss.backward()
    assert dirty_loss.item() == clean_loss.item()
    assert {k: v.item() for k, v in dirty_metrics.items()} == {k: v.item() for k, v in clean_metrics.items()}
    assert clean.grad is not None
    assert dirty_log_probs.grad is not None
    assert torch.equal(dirty_log_probs.grad, clean.grad)


def test_a_token_that_counts_is_not_hidden() -> None:
    loss, _ = ppo_clip(tokens([1.0, math.nan], [1.0, 1.0]), **CLIP)
    assert loss.isnan()


def test_an_extreme_ratio_stays_finite() -> None:
    inputs = tokens([1.0], [-1.0], old_log_probs=torch.tensor([-500.0], dtype=torch.float64))
    inputs = replace(inputs, log_probs=inputs.log_probs.float(), old_log_probs=inputs.old_log_probs.float())
    loss, metrics = ppo_clip(inputs, **CLIP)
    assert loss.isfinite()
    assert all(value.isfinite() for value in metrics.values())


def test_metrics_carry_no_gradient() -> None:
    inputs = random_tokens(16)
    inputs.log_probs.requires_grad_()
    inputs.entropy.requires_grad_()
    loss, metrics = OBJECTIVE(inputs)
    assert loss.requires_grad
    assert [name for name, value in metrics.items() if value.requires_grad] == []


def test_objective_survives_pickling() -> None:
    inputs = random_tokens(16)
    assert pickle.loads(pickle.dumps(OBJECTIVE))(inputs)[0].item() == OBJECTIVE(inputs)[0].item()


def test_options_are_bound_by_signature() -> None:
    options = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": None}
    inputs = tokens([1.5], [1.0])
    assert bind_options(ppo_clip, **options)(inputs)[0].item() == pytest.approx(-1.3)
    assert bind_options(sft, **options)(inputs)[0].item() == sft(inputs)[0].item()


def test_a_loss_with_open_options_gets_them_all() -> None:
    seen: dict[str, Any] = {}

    def loss(inputs: LossInputs, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        seen.update(options)
        return inputs.log_probs.sum(), {}

    bind_options(loss, clip_low=0.1, dual_clip=None)(tokens([1.0], [1.0]))
    assert seen == {"clip_low": 0.1, "dual_clip": None}


ONE = torch.ones([])


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (3, r"it returned 3 \(int\)"),
        (None, r"it returned None \(NoneType\)"),
        (ONE, r"it returned a tensor of shape \[\]"),
        ((ONE, {}, {}), "it returned a tuple of 3 items"),
        ((ONE, None), r"its metrics are None \(NoneType\)"),
        ((0.5, {}), r"its loss is 0.5 \(float\)"),
        ((torch.ones(2), {}), r"its loss is a tensor of shape \[2\]"),
        ((ONE, {"kept": ONE, "ratio": 1.0}), r"its metric 'ratio' is 1.0 \(float\)"),
    ],
)
def test_a_policy_loss_with_a_wrong_result_is_named(result: Any, problem: str) -> None:
    def my_loss(inputs: LossInputs) -> Any:
        return result

    objective = policy_objective(bind_options(my_loss))
    with pytest.raises(PluginError, match=rf"my_loss' must return a scalar loss .*; {problem}\.") as caught:
        objective(tokens([1.0], [1.0]))
    assert caught.value.hint is not None
