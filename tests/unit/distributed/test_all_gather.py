"""Values from other ranks, which are JSON of a given type and nothing else."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from anygauge.distributed import all_gather
from anygauge.distributed.all_gather import all_gather_values
from anygauge_hooks.errors import RankMismatchError

NUMBERS = TypeAdapter(list[float], config=ConfigDict(ser_json_inf_nan="constants"))
Peer = Callable[[bytes], Any]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """Return a function that sets what rank 1 of a group of two sends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sent: list[bytes] = []

    def gather(parts: list[Tensor], mine: Tensor, group: Any = None) -> None:
        parts[0].copy_(mine)
        if mine.dtype == torch.int64:
            parts[1].fill_(len(sent[0]))
        else:
            parts[1].copy_(torch.frombuffer(bytearray(sent[0].ljust(len(mine))), dtype=torch.uint8))

    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    yield sent.append
    dist.destroy_process_group()


def test_values_keep_every_bit(peer: Peer) -> None:
    mine, theirs = [0.1, math.inf, 1e300], [-math.inf, 1 / 3]
    peer(NUMBERS.dump_json(theirs))
    assert all_gather_values(mine, NUMBERS) == [mine, theirs]


def test_not_a_number_stays_what_it_is(peer: Peer) -> None:
    peer(NUMBERS.dump_json([math.nan]))
    ((one,), (other,)) = all_gather_values([math.nan], NUMBERS)
    assert math.isnan(one)
    assert math.isnan(other)


def test_one_process_alone_gives_its_own() -> None:
    assert all_gather_values([1.0], NUMBERS) == [[1.0]]


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_not_loaded(peer: Peer, tmp_path: Path) -> None:
    peer(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(RankMismatchError, match="Rank 1 of a group sent no value of the expected type"):
        all_gather_values([1.0], NUMBERS)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b'["a"]', b"{}", b"[" * 10**6, b"", b"\xff\xfe", b"[1] x"])
def test_values_of_another_type_are_refused(peer: Peer, data: bytes) -> None:
    peer(data)
    with pytest.raises(RankMismatchError, match="Rank 1"):
        all_gather_values([1.0], NUMBERS)


def test_a_length_is_checked_before_memory_is_taken(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "LONGEST", 10)
    peer(bytes(11))
    with pytest.raises(RankMismatchError, match="a length of 11, and at most 10 is taken"):
        all_gather_values([1.0], NUMBERS)
