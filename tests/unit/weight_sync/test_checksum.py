"""Checksums computed where the tensors are."""

from __future__ import annotations

import pytest
import torch

from anygauge.weight_sync import checksum
from anygauge.weight_sync.checksum import digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
def test_one_wrong_bit_changes_a_digest(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_SUMMED", 8)  # several parts
    tensor = torch.randint(0, 2, (5, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    before = int(digest(tensor))
    assert int(digest(tensor.T.contiguous().T)) == before, "the layout says nothing"
    data = tensor.view(-1).view(torch.uint8)
    for place in (0, data.numel() - 1):
        data[place] ^= 1
        assert int(digest(tensor)) != before
        data[place] ^= 1
    assert int(digest(tensor)) == before
    assert int(digest(tensor[:0])) == 0
