"""Which tensors a check of replicas reads, and what it makes of the reports of ranks."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytestmark = pytest.mark.usefixtures("context")


def test_checks_read_all_tensors_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from anygauge.engines.megatron import replica_check
    from anygauge.engines.megatron.replica_check import ENDS, _part, _Replica

    replicas = [_Replica("data", 0, str(number), torch.zeros(4)) for number in range(9)]
    tied = _Replica(ENDS, 0, "tied", torch.zeros(4))
    assert _part([*replicas, tied], 1) == [*replicas, tied]
    monkeypatch.setattr(replica_check, "BYTES_AT_ONCE", 4 * 16)
    parts = [_part([*replicas, tied], turn) for turn in range(3)]
    assert all(part[-1] is tied and len(part) <= 5 for part in parts)
    assert sorted(each.name for part in parts for each in part if each is not tied) == list("012345678")


@pytest.mark.parametrize(
    ("norms", "differ"),
    [
        ((1.0, 1.0000001), False),
        ((1.0, 1.001), True),
        ((math.nan, math.nan), False),
        ((math.inf, math.inf), False),
        ((1.0, math.nan), True),
        ((math.nan, 1.0), True),
    ],
)
def test_norms_may_differ_by_rounding_alone(norms: tuple[float, float], *, differ: bool) -> None:
    from anygauge.engines.megatron.replica_check import NORM, _differing_keys

    keys = json.loads(_differing_keys([json.dumps([{"weights data 0": "a"}, norm]) for norm in norms]))
    assert keys == [NORM] * differ


def test_the_ranks_without_the_majority_are_named() -> None:
    from anygauge.engines.megatron.replica_check import _differing_keys, _named

    key, other = "gradients data 0", "weights tensor 0"
    totals = [json.dumps([{key: str(total), other: "b"}, 1.0]) for total in (1, 2, 1)]
    assert json.loads(_differing_keys(totals)) == [key]
    values = [json.dumps([{key: {"one": 5, "two": value}}, 1.0]) for value in (7, 8, 7)]
    assert _named(values) == "the gradient of two (rank 1)"
