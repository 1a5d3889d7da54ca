"""AdamW in Triton passes the conformance cases of optimizers, also in Triton's interpreter, without a GPU.

``TRITON_INTERPRET=1 pytest tests/backends/cuda/test_optimizer.py`` takes some seconds.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.testing.conformance.test_fused_optimizer import assert_remainders_do
from anygauge.testing.conformance.test_optimizer import (
    RATES,
    SETTINGS,
    SIZES,
    assert_alike,
    in_float64,
    take_step,
    two_groups,
)
from anygauge_cuda.optimizer import FusedAdamW

pytest.importorskip("triton")
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETS else "cuda"
pytestmark = [
    pytest.mark.skipif(
        not INTERPRETS and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several programs update a tensor, some with whole blocks and some without."""
    from anygauge_cuda.triton import adamw

    monkeypatch.setattr(adamw, "BLOCK", 64)
    monkeypatch.setattr(adamw, "CHUNK", 256)


@pytest.fixture(params=[0, 1], ids=["aligned", "anywhere"])
def weights(request: pytest.FixtureRequest) -> list[Tensor]:
    sizes = [1024, 64, 256] if request.param == 0 else list(SIZES)
    buffer = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    return list(torch.split(buffer.to(DEVICE), sizes))


def test_steps_are_those_of_adamw_in_float64(weights: list[Tensor]) -> None:
    optimizer = FusedAdamW(two_groups(weights), **SETTINGS)
    wide, expected = in_float64(weights)
    for step in range(len(RATES)):
        take_step(optimizer, step)
        take_step(expected, step)
        for weight, other in zip(weights, wide, strict=True):
            assert_alike(weight, other)
            for name in ("exp_avg", "exp_avg_sq"):
                assert_alike(optimizer.state[weight][name], expected.state[other][name])
            assert float(optimizer.state[weight]["step"]) == step + 1


def test_gradients_are_scaled_and_left_as_they_are_and_copies_are_rounded(weights: list[Tensor]) -> None:
    others = [weight.clone() for weight in weights]
    scaled, plain = (FusedAdamW(two_groups(each), **SETTINGS) for each in (weights, others))
    gradients: list[Any] = [torch.randn_like(weight) for weight in weights]
    before = deepcopy(gradients)
    copies: list[Any] = [torch.full_like(weight, torch.nan, dtype=torch.bfloat16) for weight in weights]
    scaled.step_from([gradients[:2], gradients[2:]], 0.25, [copies[:2], copies[2:]])
    for other, gradient in zip(others, gradients, strict=True):
        other.grad = gradient * 0.25
    plain.step()
    for weight, other, copy in zip(weights, others, copies, strict=True):
        assert weight.equal(other)
        if INTERPRETS:  # which cuts where a GPU rounds
            torch.testing.assert_close(copy.float(), weight, rtol=2**-7, atol=0)
        else:
            assert copy.equal(weight.bfloat16())
    assert all(one.equal(other) for one, other in zip(gradients, before, strict=True))


def test_a_step_may_be_prepared_and_stay_away(weights: list[Tensor]) -> None:
    others = [weight.clone() for weight in weights]
    prepared, plain = (FusedAdamW(two_groups(each), **SETTINGS) for each in (weights, others))
    gradients: list[Any] = [torch.zeros_like(weight) for weight in weights]
    given, copies = [gradients[:2], gradients[2:]], [[None] * 2, [None] * (len(weights) - 2)]
    for step in range(3):
        prepared.prepare(given, copies)
        if step == 1:  # as after a loss that is not finite, and a sleep
            weights[0].data = weights[0].data.clone()
            prepared.prepare(given, copies)
        for gradient in gradients:  # which are read by the step alone
            gradient.normal_()
        prepared.step_from(given, 0.5, copies)
        plain.step_from(given, 0.5, copies)
        for weight, other in zip(weights, others, strict=True):
            assert weight.equal(other)
            assert float(prepared.state[weight]["step"]) == step + 1


def test_the_first_step_makes_its_moments_and_not_what_comes_before(weights: list[Tensor]) -> None:
    """Where they find no room, it is the optimizer that lacks memory; a step that stays away leaves none."""
    optimizer = FusedAdamW(two_groups(weights), **SETTINGS)
    gradients: list[Any] = [torch.ones_like(weight) for weight in weights]
    given, copies = [gradients[:2], gradients[2:]], [[None] * 2, [None] * (len(weights) - 2)]
    optimizer.prepare(given, copies)
    assert not optimizer.state
    optimizer.step_from(given, 1.0, copies)
    assert [float(optimizer.state[weight]["step"]) for weight in weights] == [1] * len(weights)


def test_remainders_are_updated_like_whole_weights(weights: list[Tensor]) -> None:
    assert_remainders_do(lambda each: FusedAdamW(two_groups(each), **SETTINGS), weights)


def test_a_nan_with_all_bits_set_is_one_in_the_model(weights: list[Tensor]) -> None:
    """A GPU makes no other; rounded as a number it would be -0, of which the remainder is -1."""
    copies: list[Any] = [torch.full_like(weight, -0.0, dtype=torch.bfloat16) for weight in weights]
    gradients: list[Any] = [torch.zeros_like(weight) for weight in weights]
    optimizer = FusedAdamW(two_groups(weights), **SETTINGS)
    for weight in weights:
        weight.data = torch.full_like(weight, -1, dtype=torch.int16)
    optimizer.step_from([gradients[:2], gradients[2:]], 1.0, [copies[:2], copies[2:]])
    assert all(copy.isnan().all() for copy in copies)


def test_a_remainder_without_its_copy_is_refused(weights: list[Tensor]) -> None:
    optimizer = FusedAdamW(two_groups(weights), **SETTINGS)
    before = [weight.clone() for weight in weights]
    weights[-1].data = torch.zeros_like(weights[-1], dtype=torch.int16)
    for weight in weights[:-1]:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="without its copy: call step_from"):
        optimizer.step()
    assert all(weight.equal(other) for weight, other in zip(weights[:-1], before, strict=False))


def test_weights_that_moved_are_found(weights: list[Tensor]) -> None:
    """An engine that slept has its tensors at other addresses."""
    optimizer = FusedAdamW(two_groups(weights), **SETTINGS)
    wide, expected = in_float64(weights)
    kept = []
    for step in range(2):
        take_step(optimizer, step)
        take_step(expected, step)
        for weight in weights:
            kept.append(weight.data)
            weight.data = weight.data.clone()
    take_step(optimizer, 2)
    take_step(expected, 2)
    for weight, other in zip(weights, wide, strict=True):
        assert_alike(weight, other)
