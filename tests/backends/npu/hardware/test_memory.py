"""Memory of the loss on a real NPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.npu_hw, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

TOKENS, HIDDEN, WORDS = 8192, 4096, 151_936


def test_the_loss_needs_less_than_the_logits(npu: Any, kernels: Any) -> None:
    device, dtype = npu.torch_device, torch.bfloat16
    hidden = torch.randn(TOKENS, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(WORDS, HIDDEN, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    targets = torch.randint(WORDS, (TOKENS,), device=device)
    logprob = kernels.resolve("linear_logprob", dtype="bfloat16")
    npu.empty_cache()
    npu.peak_memory(reset=True)
    before = npu.memory()["allocated"]
    log_probs, entropy = logprob(hidden, weight, targets, 1.0, None, entropy_grad=False)
    (-log_probs.mean()).backward()
    npu.synchronize()
    needed = npu.peak_memory() - before
    assert torch.isfinite(log_probs).all()
    assert torch.isfinite(entropy).all()
    # beside the gradients of both inputs, in float32 at most
    assert needed < 4 * (weight.numel() + hidden.numel()) + TOKENS * WORDS * 4 / 2
