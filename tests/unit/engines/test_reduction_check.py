"""Sums that a reduction keeps, and what is made of the reports of ranks."""

from __future__ import annotations

import json

import pytest
import torch

pytestmark = pytest.mark.usefixtures("context")

RANKS = [0, 1]


def report(before: tuple[float, float], after: float, *, is_sharded: bool = False) -> str:
    return json.dumps([[[0, 0, RANKS], is_sharded, 1e-4, before, (after, 0.0)]])


def test_a_weighted_sum_is_that_of_its_parts_and_knows_places(monkeypatch: pytest.MonkeyPatch) -> None:
    from anygauge.engines.megatron import reduction_check
    from anygauge.engines.megatron.reduction_check import weighted_sum

    reduction_check._signs.cache_clear()
    monkeypatch.setattr(reduction_check, "PERIOD", 64)
    values = torch.randn(15 * 64, generator=torch.Generator().manual_seed(0))
    whole, norm = weighted_sum(values)
    parts = [weighted_sum(values[start : start + 250], start)[0] for start in range(0, 15 * 64, 250)]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(norm, values.norm())
    for places in (1, 64, 250):  # also whole periods of the signs
        assert abs(weighted_sum(values.roll(places))[0] - whole) > 0.02 * norm
    reduction_check._signs.cache_clear()


def test_nothing_has_no_sum() -> None:
    from anygauge.engines.megatron.reduction_check import weighted_sum

    assert weighted_sum(torch.zeros(0)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("reports", "is_wrong"),
    [
        ([report((1.0, 2.0), 4.0), report((3.0, 2.0), 4.0)], False),
        ([report((1.0, 2.0), 4.0), report((3.0, 2.0), 4.0003)], False),
        ([report((1.0, 2.0), 4.0), report((3.0, 2.0), 4.001)], True),
        ([report((1.0, 2.0), 1.0), report((3.0, 2.0), 3.0)], True),
        ([report((1.0, 2.0), float("nan")), report((3.0, 2.0), 4.0)], True),
        ([report((float("inf"), 2.0), 1.0), report((-float("inf"), 2.0), 1.0)], False),
        ([report((1.0, 2.0), 1.5, is_sharded=True), report((3.0, 2.0), 2.5, is_sharded=True)], False),
        ([report((1.0, 2.0), 1.5, is_sharded=True), report((3.0, 2.0), 1.5, is_sharded=True)], True),
        (["[]", "[]"], False),
    ],
    ids=["equal", "rounded", "off", "unreduced", "nan", "overflow", "shards", "shard", "nothing"],
)
def test_sums_after_a_reduction_are_those_before(reports: list[str], is_wrong: bool) -> None:
    """A step whose gradients overflow before their reduction is the engine's to stop."""
    from anygauge.engines.megatron.reduction_check import wrong_sums

    assert bool(wrong_sums(reports)) == is_wrong
