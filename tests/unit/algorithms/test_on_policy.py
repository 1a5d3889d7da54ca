"""The difference of log-probs is a mean over the tokens of on-policy samples, whatever the loss is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from anygauge.algorithms.losses import policy_gradient
from anygauge.algorithms.on_policy import OnPolicyDifference
from anygauge_hooks.engines import LossInputs

ROLLOUT = torch.tensor([-1.0, -2.0, -3.0, -4.0])
INPUTS = LossInputs(
    log_probs=(ROLLOUT + torch.tensor([0.1, -0.2, 0.4, -0.8])).requires_grad_(),
    entropy=torch.zeros(4),
    old_log_probs=ROLLOUT,
    rollout_log_probs=ROLLOUT,
    reference_log_probs=None,
    advantages=torch.ones(4),
    loss_mask=torch.ones(4),
    loss_weights=torch.tensor([0.5, 0.5, 1.0, 0.0]),  # of an aggregation that is no mean over tokens
    samples=[2, 0],
    lengths=[1, 3],
)


def measured(inputs: LossInputs, is_on_policy: list[bool]) -> tuple[float, float]:
    _, metrics = OnPolicyDifference(policy_gradient, is_on_policy)(inputs)
    return metrics["on_policy_abs_diff"].item(), metrics["on_policy_tokens"].item()


@pytest.mark.parametrize(
    ("is_on_policy", "total", "tokens"),
    [
        ([True, False, True], 1.5, 4),
        ([True, True, False], 1.4, 3),
        ([False, True, True], 0.1, 1),
        ([False, True, False], 0.0, 0),
    ],
)
def test_tokens_of_samples_that_are_on_policy_count_alike(
    is_on_policy: list[bool], total: float, tokens: int
) -> None:
    assert measured(INPUTS, is_on_policy) == (pytest.approx(total), tokens)


def test_masked_tokens_may_hold_anything() -> None:
    masked = replace(
        INPUTS,
        loss_mask=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        rollout_log_probs=torch.tensor([-1.0, math.nan, -3.0, -4.0]),
    )
    assert measured(masked, [True] * 3) == (pytest.approx(1.3), 3)


def test_the_loss_stays_as_it_is() -> None:
    loss, metrics = OnPolicyDifference(policy_gradient, [True] * 3)(INPUTS)
    plain, reported = policy_gradient(INPUTS)
    assert torch.equal(loss, plain)
    assert reported.keys() < metrics.keys()
    gradients = [torch.autograd.grad(each, INPUTS.log_probs)[0] for each in (loss, plain)]
    assert torch.equal(*gradients)
