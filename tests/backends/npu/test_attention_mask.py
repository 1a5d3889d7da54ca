"""A mask goes with causal attention alone: a vision tower sees in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anygauge_npu import attention
from anygauge_npu.attention import varlen_attention


def test_a_mask_of_an_inference_pass_serves_a_training_pass() -> None:
    attention._future.cache_clear()
    with torch.inference_mode():
        mask = attention._future(torch.device("cpu"))
    assert not mask.is_inference()


@pytest.mark.parametrize("causal", [True, False])
def test_only_a_causal_layer_gets_a_mask(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def operator(q: Any, k: Any, v: Any, *_: Any, **options: Any) -> Any:
        calls.append(options)
        rows = torch.zeros(len(q), q.shape[1], 8)
        return torch.zeros(len(q), q.shape[1], v.shape[-1]), rows, rows, None, 0, 0, 0

    monkeypatch.setattr(torch.ops.npu, "npu_fusion_attention", operator, raising=False)
    q, k, v = torch.ones(5, 4, 16), torch.ones(5, 2, 16), torch.ones(5, 2, 16)
    varlen_attention(q, k, v, (3, 2), 0.25, causal=causal)
    (options,) = calls
    assert options["actual_seq_qlen"] == options["actual_seq_kvlen"] == [3, 5]
    if not causal:
        assert options["atten_mask"] is None
        assert options["sparse_mode"] == 0
        return
    mask = options["atten_mask"]
    assert mask.dtype == torch.bool
    assert torch.equal(mask, torch.ones_like(mask).triu(1))  # what is true is not seen
    assert options["sparse_mode"] == 3  # aligned at the last query and the last key of a sequence
