"""Difference between trainer and rollout engine on tokens that the trained weights have sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anygauge_hooks.engines import LossFunction, LossInputs

__all__ = ["ON_POLICY", "OnPolicyDifference"]

DIFFERENCE, TOKENS = "on_policy_abs_diff", "on_policy_tokens"
ON_POLICY = (DIFFERENCE, TOKENS)
"""Sum of the absolute log-prob differences, and how many tokens it is over."""


@dataclass(frozen=True, slots=True)
class OnPolicyDifference:
    """A loss that reports :data:`ON_POLICY` too, whatever the policy loss and its aggregation are.

    The numbers mean what they say in the first optimizer step of a rollout alone: after it, the trainer's
    weights are no longer those that sampled.
    """

    loss: LossFunction
    is_on_policy: Sequence[bool]
    """One flag for each sample of the optimizer step."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the scalar loss, and metrics that add up over micro-batches."""
        loss, metrics = self.loss(inputs)
        counts, chosen = inputs.loss_mask != 0, [self.is_on_policy[sample] for sample in inputs.samples]
        if not all(chosen):
            of_samples = torch.tensor(chosen).repeat_interleave(torch.tensor(inputs.lengths))
            counts &= of_samples.to(counts.device)
        with torch.no_grad():
            gaps = (inputs.log_probs - inputs.rollout_log_probs).abs().where(counts, 0.0)
        return loss, {**metrics, DIFFERENCE: gaps.sum(), TOKENS: counts.sum()}
