"""An optimizer with the members of ``FusedOptimizer`` does in one step what the engine does in several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.kernels.remainders import join, split
from anygauge.plugins import Plugins
from anygauge.testing.conformance.test_optimizer import (
    MOMENTS,
    RATES,
    Maker,
    assert_alike,
    equal,
    gradients_of,
    in_float64,
    make_weights,
)
from anygauge_hooks.optimizers import FusedOptimizer
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

ODD = (0.0, -0.0, 1.00390625, -1.01171875, torch.inf, -torch.inf, torch.finfo(torch.float32).max, torch.nan)
"""The third and the fourth are in the middle between two bfloat16 numbers."""
SCALE = 0.375


@pytest.fixture
def make(plugins: Plugins, backend: BackendSpec, device: Device) -> Any:
    """Return the maker of a fused optimizer, or ``None``: the engine then scales and copies itself."""
    maker = Maker(plugins, backend)
    return maker if isinstance(maker(make_weights(device)), FusedOptimizer) else None


def by_group(tensors: list[Any]) -> list[list[Any]]:
    return [tensors[:2], tensors[2:]]


def room_for(weights: list[Tensor]) -> list[Any]:
    """Return copies that are views of one buffer."""
    room = torch.zeros(sum(map(len, weights)), dtype=torch.bfloat16, device=weights[0].device)
    return list(torch.split(room, [len(weight) for weight in weights]))


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def fused_step(optimizer: Any, gradients: list[Tensor], copies: list[Any], *, prepares: bool = False) -> None:
    arguments = by_group(gradients), by_group(copies)
    if prepares:
        optimizer.prepare(*arguments)
    optimizer.step_from(arguments[0], SCALE, arguments[1])


@pytest.mark.parametrize("prepares", [False, True], ids=["at once", "prepared"])
def test_a_fused_step_scales_steps_and_copies(make: Maker | None, device: Device, prepares: bool) -> None:
    if make is None:
        return
    weights = make_weights(device)
    wide, expected = in_float64(weights)
    optimizer, copies = make(weights), room_for(weights)
    copies[2] = None
    for weight in weights:
        weight.grad = torch.full_like(weight, torch.nan)  # is not read
    for step, rate in enumerate(RATES):
        gradients = gradients_of(weights, step)
        before = [gradient.clone() for gradient in gradients]
        set_rate(optimizer, rate)
        set_rate(expected, rate)
        fused_step(optimizer, gradients, copies, prepares=prepares)
        assert equal(gradients, before)
        for other, gradient in zip(wide, gradients, strict=True):
            other.grad = gradient.cpu().double() * SCALE
        expected.step()
        for weight, copy, other in zip(weights, copies, wide, strict=True):
            assert_alike(weight, other)
            for name in MOMENTS:
                assert_alike(optimizer.state[weight][name], expected.state[other][name])
            assert float(optimizer.state[weight]["step"]) == step + 1
            if copy is not None:
                torch.testing.assert_close(copy.float(), weight, rtol=2**-8, atol=1e-38)


def test_copies_of_a_fused_step_are_rounded_to_nearest(make: Maker | None, device: Device) -> None:
    if make is None:
        return
    weights = make_weights(device)
    optimizer, copies = make(weights), room_for(weights)
    fused_step(optimizer, gradients_of(weights, 0), copies)
    for weight, copy in zip(weights, copies, strict=True):
        ties = (weight.view(torch.int32) & 0xFFFF) == 0x8000
        rounded = weight.bfloat16()
        assert torch.equal(copy[~ties], rounded[~ties])


def test_a_prepared_step_reads_gradients_when_it_is_taken(make: Maker | None, device: Device) -> None:
    if make is None:
        return
    results = []
    for is_late in (False, True):
        weights = make_weights(device)
        optimizer, copies = make(weights), room_for(weights)
        fused_step(optimizer, gradients_of(weights, 0), copies)
        if is_late:
            optimizer.prepare(by_group(gradients_of(weights, 3)), by_group(copies))  # of a step left out
        gradients = gradients_of(weights, 1)
        given = [torch.zeros_like(gradient) if is_late else gradient for gradient in gradients]
        arguments = by_group(given), by_group(copies)
        optimizer.prepare(*arguments)
        set_rate(optimizer, RATES[1])
        for tensor, gradient in zip(given, gradients, strict=True):
            tensor.copy_(gradient)
        optimizer.step_from(arguments[0], SCALE, arguments[1])
        results.append([*weights, *copies])
    assert equal(*results)


def test_a_step_that_was_prepared_and_left_out_changes_nothing(make: Maker | None, device: Device) -> None:
    if make is None:
        return
    results = []
    for leaves_out in (False, True):
        weights = make_weights(device)
        optimizer, copies = make(weights), room_for(weights)
        for step in range(2):
            if leaves_out:
                optimizer.prepare(by_group(gradients_of(weights, 3)), by_group(copies))
            fused_step(optimizer, gradients_of(weights, step), copies)
        results.append([*weights, *copies])
    assert equal(*results)


def test_plain_and_fused_steps_may_take_turns(make: Maker | None, device: Device) -> None:
    if make is None:
        return
    weights = make_weights(device)
    wide, expected = in_float64(weights)
    optimizer = make(weights)
    for step in range(4):
        gradients = gradients_of(weights, step)
        for weight, other, gradient in zip(weights, wide, gradients, strict=True):
            weight.grad, other.grad = gradient * SCALE, gradient.cpu().double() * SCALE
        if step % 2:
            optimizer.step()
        else:
            fused_step(optimizer, gradients, [None] * len(weights))
        expected.step()
    for weight, other in zip(weights, wide, strict=True):
        assert_alike(weight, other)


def test_remainders_where_they_are_taken_are_updated_like_whole_weights(
    make: Maker | None, device: Device
) -> None:
    weights = make_weights(device)
    if make is not None and make(weights).takes_remainders:  # otherwise the engine gives it none
        assert_remainders_do(make, weights)


def assert_remainders_do(build: Callable[[list[Tensor]], Any], weights: list[Tensor]) -> None:
    """Compare weights whose upper halves are the copies with whole ones, bit for bit.

    :param build: Returns an optimizer of two groups, of which the second does not decay.
    """
    weights[-1][: len(ODD)].copy_(torch.tensor(ODD))
    remainders = [weight.clone() for weight in weights]
    whole, halves = build(weights), build(remainders)
    copies = room_for(weights)
    for copy, remainder in zip(copies, remainders, strict=True):
        rounded, remainder.data = split(remainder.data)
        copy.copy_(rounded)
    for step, rate in enumerate(RATES):
        gradients = gradients_of(weights, step)
        gradients[-1][: len(ODD)] = 0
        for optimizer, other in ((whole, [torch.zeros_like(copy) for copy in copies]), (halves, copies)):
            set_rate(optimizer, rate)
            fused_step(optimizer, gradients, other)
        for weight, remainder, copy in zip(weights, remainders, copies, strict=True):
            assert remainder.dtype == torch.int16
            expected = split(weight)
            assert copy.view(torch.int16).equal(expected[0].view(torch.int16))
            assert join(copy, remainder).view(torch.int32).equal(join(*expected).view(torch.int32))
            for name in MOMENTS:
                assert halves.state[remainder][name].equal(whole.state[weight][name])
