"""Pieces of regions of parameters, written as ranks of one layout have them, read as others need them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anygauge.engines.checkpoint_files import (
    FORMAT,
    Piece,
    RankFile,
    Region,
    open_pieces,
    write_rank,
)
from anygauge.engines.megatron.weights.sharding import local_shape, shard, stretches
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.megatron import WeightRule

RULES: dict[str, tuple[WeightRule, tuple[int, ...]]] = {
    "rows": (WeightRule(canonical="t", hf=("t",), split_dim=0), (8, 3)),
    "columns": (WeightRule(canonical="t", hf=("t",), split_dim=1), (3, 8)),
    "middle": (WeightRule(canonical="t", hf=("t",), split_dim=1), (2, 8, 3)),
    "gate-up": (
        WeightRule(canonical="t", hf=("g", "u"), transform="concat", sections=((8,), (4, 4)), split_dim=0),
        (16, 3),
    ),
    "groups": (
        WeightRule(
            canonical="t",
            hf=("q", "k"),
            transform="interleave",
            sections=((8,), (4,)),
            groups=4,
            split_dim=0,
        ),
        (12, 3),
    ),
    "heads": (
        WeightRule(
            canonical="t", hf=("h",), transform="deinterleave", sections=((8, 4),), groups=4, split_dim=0
        ),
        (12, 3),
    ),
    "vocabulary": (WeightRule(canonical="t", hf=("t",), split_dim=0, pads_vocab=True), (5, 3)),
    "bias": (WeightRule(canonical="t", hf=("t",), split_dim=0), (8,)),
    "replicated": (WeightRule(canonical="t", hf=("t",)), (3,)),
}
WAYS = (1, 2, 4)


def region(rule: WeightRule, shape: tuple[int, ...], ways: int, index: int) -> Region:
    dim = rule.split_dim or 0
    return Region(
        shape=shape,
        dim=dim,
        stretches=tuple(stretches(rule, shape[dim], ways, index)),
        size=local_shape(rule, shape, ways)[dim],
    )


def write(directory: Path, rule: WeightRule, whole: Tensor, ways: int, cut: int) -> None:
    """Write a tensor as two data-parallel copies of so many shards would; the first has ``cut`` elements."""
    directory.mkdir()
    shards = 1 if rule.split_dim is None else ways
    for rank in range(2 * shards):
        index, copy = divmod(rank, 2)
        part = region(rule, tuple(whole.shape), shards, index)
        start, end = ((0, cut), (cut, part.elements))[copy]
        piece = Piece(name="t", region=part, start=start, end=end, kinds=["weight"], scalars={"step": 2.0})
        flat = shard(rule, whole, shards, index).contiguous().view(-1)[start:end].contiguous()
        description = RankFile(
            format=FORMAT,
            rank=rank,
            world_size=2 * shards,
            layout={},
            device="cpu",
            pieces=[piece],
            schedule={},
            groups=[],
            rng={},
        )
        write_rank(directory, description, {"weight/t": flat})


@pytest.mark.parametrize("kind", RULES)
def test_every_part_of_every_region_is_read_from_every_other_layout(kind: str, tmp_path: Path) -> None:
    rule, shape = RULES[kind]
    whole = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    for before in WAYS:
        write(tmp_path / str(before), rule, whole, before, cut=2)
        with open_pieces(tmp_path / str(before)) as reader:
            for after in WAYS:
                for index in range(after):
                    wanted = region(rule, shape, after, index)
                    expected = shard(rule, whole, after, index).reshape(-1)
                    for start in range(0, wanted.elements, 5):
                        for end in {*range(start + 1, wanted.elements, 4), wanted.elements}:
                            part = ("t", wanted, start, end)
                            found = reader.read("weight", *part)
                            assert found is not None
                            assert torch.equal(found, expected[start:end])
                            assert reader.dtype("weight", *part) == torch.float32
                            assert reader.scalars(*part) == {"step": 2.0}
                            assert reader.kinds(*part) == {"weight"}


def test_a_shard_that_no_file_has_is_said(tmp_path: Path) -> None:
    rule, shape = RULES["columns"]
    write(tmp_path / "saved", rule, torch.rand(shape), 2, cut=2)
    with open_pieces(tmp_path / "saved") as reader:
        lost = region(rule, shape, 2, 1)
        del reader._pieces["t"][lost]
        with pytest.raises(CheckpointError, match="lacks 4 indices of weight of t along dimension 1"):
            reader.dtype("weight", "t", region(rule, shape, 1, 0), 0, 24)
        found = reader.read("weight", "t", region(rule, shape, 4, 0), 0, 6)
        assert found is not None
