"""Checksums computed where the tensors are."""

from __future__ import annotations

import pytest
import torch

from anygauge.weight_sync.checksum import digest, digests


@pytest.mark.parametrize("shape", [(5, 7), (64, 6)], ids=["odd", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
def test_one_wrong_bit_changes_a_digest(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = int(digest(tensor))
    assert int(digest(tensor.T.contiguous().T)) == before, "the layout says nothing"
    data = tensor.view(-1).view(torch.uint8)
    for place in (0, data.numel() - 1):
        data[place] ^= 1
        assert int(digest(tensor)) != before
        data[place] ^= 1
    assert int(digest(tensor)) == before
    assert int(digest(tensor[:0])) == 0


def test_a_digest_says_nothing_of_where_a_tensor_lies() -> None:
    """Ranks that keep the same weight at another offset have the same digest."""
    tensor = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    moved = torch.cat((torch.zeros(1), tensor.view(-1)))[1:].view(3, 40)
    assert digests([tensor, moved]).tolist() == [int(digest(tensor))] * 2
    assert int(digest(tensor[:, torch.arange(40).roll(2)])) != int(digest(tensor))
