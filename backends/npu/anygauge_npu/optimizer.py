"""The optimizer of the NPU backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["fused_adamw"]


def fused_adamw(
    param_groups: Sequence[Mapping[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Return AdamW (https://arxiv.org/abs/1711.05101 algorithm 2) with CANN's fused kernel.

    Torch-npu serves torch's own operator with it (``aclnnApplyAdamWV2``); ``npu_apply_adam_w`` only has the
    older kernel, which is compiled on first use.

    :param param_groups: float32 tensors on the NPU.
    :param lr: Learning rate of the first step.
    :param betas: Decay rates of the two moments.
    :param eps: Added to the denominator.
    :param weight_decay: Decoupled decay.
    :returns: An optimizer whose state is ``exp_avg``, ``exp_avg_sq`` and ``step`` (a float32 scalar on the
        NPU).
    """
    groups = [dict(group) for group in param_groups]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
