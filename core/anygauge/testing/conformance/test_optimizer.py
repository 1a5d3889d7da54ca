"""The AdamW that a backend makes agrees with one in float64, and keeps its state under the names of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from anygauge.kernels.remainders import join, split
from anygauge.plugins import Plugins
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_hooks.optimizers import FusedOptimizer
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

SIZES = (1, 7, 64, 1031)
SETTINGS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.98), "eps": 1e-3, "weight_decay": 0.3}
"""None is torch's default, so that an optimizer that forgets one differs."""
RATES = (0.1, 0.05, 0.2)
"""Learning rate of each step, as a schedule sets it."""
ODD = (0.0, -0.0, 1.00390625, -1.01171875, torch.inf, -torch.inf, torch.finfo(torch.float32).max, torch.nan)
"""The third and the fourth are in the middle between two bfloat16 numbers."""


@pytest.fixture
def weights(device: Device) -> list[Tensor]:
    """Return shards of one buffer, which are views that start anywhere."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(sum(SIZES), generator=generator).to(device.torch_device)
    return list(torch.split(buffer, list(SIZES)))


@pytest.fixture
def optimizer(plugins: Plugins, backend: BackendSpec, weights: list[Tensor]) -> Optimizer:
    """Return the backend's optimizer, or torch's where it makes none."""
    return build(plugins, backend, weights)


def two_groups(weights: list[Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups of which the second does not decay."""
    return [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}]


def build(plugins: Plugins, backend: BackendSpec, weights: list[Tensor]) -> Optimizer:
    groups = two_groups(weights)
    made: Optimizer | None = plugins.first("make_optimizer", backend=backend, param_groups=groups, **SETTINGS)
    return AdamW(groups, **SETTINGS) if made is None else made


def in_float64(weights: list[Tensor]) -> tuple[list[Tensor], AdamW]:
    wide = [weight.cpu().double() for weight in weights]
    return wide, AdamW(two_groups(wide), **SETTINGS, foreach=False, fused=False)


def take_step(optimizer: Optimizer, step: int) -> None:
    """Step with gradients that depend on the number of the step alone, some of which are tiny."""
    generator = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        group["lr"] = RATES[step]
        for weight in group["params"]:
            gradient = torch.randn(weight.shape, generator=generator) ** 5
            weight.grad = gradient.to(weight)
    optimizer.step()


def assert_alike(actual: Tensor, expected: Tensor) -> None:
    relative, absolute = TOLERANCES["float32"]
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=relative, atol=absolute * scale)


def assert_remainders_do(build: Callable[[list[Tensor]], Any], weights: list[Tensor]) -> None:
    """Compare weights whose upper halves are the copies with whole ones, bit for bit.

    :param build: Returns an optimizer of weights as :func:`two_groups` divides them.
    """
    still = weights[-1][: len(ODD)]  # of the group without decay
    still.copy_(torch.tensor(ODD))
    remainders = [weight.clone() for weight in weights]
    whole, halves = build(weights), build(remainders)
    room = torch.zeros(sum(map(len, weights)), dtype=torch.bfloat16, device=still.device)
    copies: list[Any] = list(torch.split(room, [len(weight) for weight in weights]))
    for copy, remainder in zip(copies, remainders, strict=True):
        rounded, remainder.data = split(remainder.data)
        copy.copy_(rounded)
    generator = torch.Generator().manual_seed(0)
    for rate in RATES:
        gradients: list[Any] = [
            (torch.randn(weight.shape, generator=generator) ** 5).to(weight) for weight in weights
        ]
        gradients[-1][: len(ODD)] = 0
        for optimizer, other in ((whole, [torch.zeros_like(copy) for copy in copies]), (halves, copies)):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step_from([gradients[:2], gradients[2:]], 0.5, [other[:2], other[2:]])
        for weight, remainder, copy in zip(weights, remainders, copies, strict=True):
            assert remainder.dtype == torch.int16
            expected = split(weight)
            assert copy.view(torch.int16).equal(expected[0].view(torch.int16))
            assert join(copy, remainder).view(torch.int32).equal(join(*expected).view(torch.int32))
            for name in ("exp_avg", "exp_avg_sq"):
                assert halves.state[remainder][name].equal(whole.state[weight][name])


def test_steps_are_those_of_adamw_in_float64(optimizer: Optimizer, weights: list[Tensor]) -> None:
    wide, expected = in_float64(weights)
    for step in range(len(RATES)):
        take_step(optimizer, step)
        take_step(expected, step)
        for weight, other in zip(weights, wide, strict=True):
            assert_alike(weight, other)
            for name in ("exp_avg", "exp_avg_sq"):
                assert_alike(optimizer.state[weight][name], expected.state[other][name])


def test_state_has_the_names_of_torch_and_lies_on_the_device(
    optimizer: Optimizer, weights: list[Tensor], device: Device
) -> None:
    take_step(optimizer, 0)
    take_step(optimizer, 1)
    for weight in weights:
        state: Mapping[str, Any] = optimizer.state[weight]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert float(state["step"]) == 2
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].shape == weight.shape
            assert state[name].dtype == torch.float32
            assert state[name].device.type == device.type


def test_an_optimizer_goes_on_from_the_state_of_another(
    plugins: Plugins, backend: BackendSpec, optimizer: Optimizer, weights: list[Tensor]
) -> None:
    take_step(optimizer, 0)
    copies = [weight.clone() for weight in weights]
    resumed = build(plugins, backend, copies)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))  # it would share the tensors
    take_step(optimizer, 1)
    take_step(resumed, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights, copies, strict=True))


def test_remainders_where_they_are_taken_are_updated_like_whole_weights(
    plugins: Plugins, backend: BackendSpec, optimizer: Optimizer, weights: list[Tensor]
) -> None:
    # otherwise the engine gives it none
    if isinstance(optimizer, FusedOptimizer) and optimizer.takes_remainders:
        assert_remainders_do(lambda each: build(plugins, backend, each), weights)
