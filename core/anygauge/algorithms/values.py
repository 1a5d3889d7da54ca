"""The loss of a critic."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anygauge_hooks.algorithms import ValueInputs

__all__ = ["value_loss"]


def value_loss(inputs: ValueInputs, *, clip: float | None = None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return half the squared error, clipped, https://arxiv.org/abs/2005.12729 section 3.

    ``max((V - G)^2, (V_old + clamp(V - V_old, -clip, clip) - G)^2) / 2``: a value that has moved by more than
    ``clip`` since the rollout gets no gradient to go on.

    :param inputs: Tokens of a micro-batch, ``[T]``.
    :param clip: In units of the reward; ``None`` does not clip.
    :returns: Scalar loss, and metrics that add up over micro-batches.
    """
    counts = inputs.loss_mask != 0
    values, old, returns, weights = (
        each.where(counts, 0.0)
        for each in (inputs.values, inputs.old_values, inputs.returns, inputs.loss_weights)
    )
    errors = (values - returns).square()
    metrics = {"values": values.detach(), "returns": returns}
    if clip is not None:
        moved = values - old
        clipped = (old + moved.clamp(-clip, clip) - returns).square()
        # Within the range both are the same but for rounding, which is no clipping.
        counted = (moved.abs() > clip) & (clipped > errors)
        metrics["value_clipfrac"] = counted.to(errors.dtype)
        errors = torch.where(counted, clipped, errors)
    loss = (errors * weights).sum() / 2
    reported = {name: (value * weights).sum() for name, value in metrics.items()}
    return loss, {"value_loss": loss.detach(), **reported}
