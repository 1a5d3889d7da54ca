"""KL estimators: exact values, exact zeros, bounds and gradients."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from anygauge.algorithms.kl import KlType, kl_divergence

KL_TYPES: tuple[KlType, ...] = get_args(KlType)


@pytest.mark.parametrize(
    ("kl_type", "expected"),
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),
        ("low_var_kl", 0.5 - 1 + math.log(2)),
    ],
)
def test_where_the_policy_is_twice_as_sure(kl_type: KlType, expected: float) -> None:
    log_probs = torch.tensor([math.log(0.5)], dtype=torch.float64)
    reference = torch.tensor([math.log(0.25)], dtype=torch.float64)
    assert kl_divergence(log_probs, reference, kl_type).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_is_exactly_zero_for_equal_policies(kl_type: KlType) -> None:
    log_probs = torch.randn(64, generator=torch.Generator().manual_seed(0)) - 3
    assert (kl_divergence(log_probs, log_probs.clone(), kl_type) == 0).all()


@pytest.mark.parametrize("kl_type", ["k2", "k3", "low_var_kl"])
def test_is_never_negative(kl_type: KlType) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, reference = (torch.randn(4096, generator=generator) - 3 for _ in range(2))
    assert (kl_divergence(log_probs, reference, kl_type) >= 0).all()


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_is_unbiased(kl_type: KlType) -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    estimate = (policy * kl_divergence(policy.log(), reference.log(), kl_type)).sum()
    exact = (policy * (policy / reference).log()).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("difference", [-1e4, -30.0, 30.0, 1e4])
def test_low_var_kl_is_bounded_and_flat_past_the_bound(difference: float) -> None:
    log_probs = torch.zeros(1, requires_grad=True)
    kl = kl_divergence(log_probs, torch.tensor([difference]), "low_var_kl")
    kl.sum().backward()
    assert kl.item() == 10.0
    assert log_probs.grad is not None
    assert log_probs.grad.item() == 0.0


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_gradient(kl_type: KlType) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs, reference = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda x: kl_divergence(x, reference, kl_type), (log_probs.requires_grad_(),)
    )


def test_expected_gradient_of_k2_is_that_of_the_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    log_probs = logits.log_softmax(0)
    probs = log_probs.exp()
    (exact,) = torch.autograd.grad((probs * (log_probs - reference)).sum(), logits, retain_graph=True)
    expected = (probs.detach() * kl_divergence(log_probs, reference, "k2")).sum()
    (estimate,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(estimate, exact, rtol=1e-12, atol=1e-12)
