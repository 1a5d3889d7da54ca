"""Operations that a step of a frozen model spares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from anygauge.config import Config
from anygauge.observability.metrics import StepWork
from anygauge.trainer.loop_state import Loop


def spared(train: dict[str, Any]) -> float:
    config = Config.model_validate(
        {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"train": []}, "train": train}
    )
    none: Any = None
    session = cast("Any", SimpleNamespace(config=config))
    loop = Loop(
        session=session, directory=none, source=none, flops_per_token=lambda length: 3.0, checkpoints=None
    )
    flops_per_token, _, frozen = loop.flops
    return StepWork.of_lengths([4, 6], [2, 2], flops_per_token, frozen=frozen).spared_flops


@pytest.mark.parametrize(("train", "expected"), [({}, 0.0), ({"lora": {"rank": 4}}, 30.0)])
def test_gradients_of_weights_beside_adapters_are_not_counted(train: dict[str, Any], expected: float) -> None:
    """Those of activations are: half of a backward pass, as many as the forward pass has."""
    assert spared(train) == expected
