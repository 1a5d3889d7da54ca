"""The budget is the configured one, or a tenth of the memory that was free when it was first asked for."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.kernels.loss_budget import GIB, LossBudget


def device(**sizes: float) -> Any:
    memory = {name: int(gib * GIB) for name, gib in sizes.items()}
    return SimpleNamespace(memory=lambda: memory, torch_device="gpu:3", sizes=memory)


@pytest.mark.parametrize("gib", [0.0, 2.5])
def test_what_is_set_is_taken(gib: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert LossBudget(gib, device(free=100))() == gib * GIB
    assert not caplog.messages


@pytest.mark.parametrize(
    "sizes",
    [{"free": 20}, {"free": 12, "reserved": 48, "allocated": 40, "total": 80}, {"free": 20, "allocated": 5}],
    ids=["bare", "blocks that torch holds unused", "a host"],
)
def test_a_tenth_of_what_is_free_is_taken_once(
    sizes: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target = device(**sizes)
    budget = LossBudget(None, target)
    assert not caplog.messages, "it is too early to say"
    assert budget() == 2 * GIB
    target.sizes["free"] = 0
    assert budget() == 2 * GIB
    (message,) = caplog.messages
    assert "up to 2.00 GiB" in message
    assert "20.00 GiB that are free on gpu:3" in message
    assert "train.loss_memory_gib" in message
