"""The NPU's rotation by angles of other kinds, on the host version of its operator: simulated."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from anygauge.kernels import reference
from anygauge_models.rope import half_rotary
from anygauge_npu.rotary import rotary_embedding
from contract import read as contract
from contract.standin import declared
from simulation.operators import OPERATORS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch-npu itself declares the operators here"
)
TOKENS, WIDTH, ROTARY = 7, 24, 16
Angles = tuple[Tensor, Tensor]
"""``[T, R]`` cosines and sines."""


@pytest.fixture(autouse=True)
def host_operator() -> Iterator[None]:
    name = "npu_rotary_mul"
    schema = {name: contract.contracts()["2.13.0"]["operators"][name]}
    with declared(schema, OPERATORS.__getitem__):
        yield


def of_three_axes(*, interleaved: bool) -> Angles:
    """Return the angles of an image's tokens: one time, rows and columns."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": interleaved}
    count = torch.arange(TOKENS)
    positions = torch.stack((torch.full((TOKENS,), 5), 5 + count // 3, 5 + count % 3))
    cos, sin = half_rotary(lambda _: ROTARY)({"rope_parameters": rope}, positions)
    text, _ = half_rotary(lambda _: ROTARY)({"rope_parameters": rope}, count)
    assert not torch.equal(cos, text)
    return cos, sin


def of_unequal_halves() -> Angles:
    angles = torch.linspace(0, 6, TOKENS * ROTARY).view(TOKENS, ROTARY)
    first, second = angles.cos().chunk(2, dim=-1)
    assert not torch.allclose(first, second, atol=0.1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    "angles",
    [
        lambda: of_three_axes(interleaved=False),
        lambda: of_three_axes(interleaved=True),
        of_unequal_halves,
    ],
    ids=["three axes", "three axes in turn", "unequal halves"],
)
def test_forward_and_backward_are_those_of_the_reference(angles: Callable[[], Angles]) -> None:
    generator = torch.Generator().manual_seed(0)
    turns = angles()
    q, k = (torch.randn(TOKENS, heads, WIDTH, generator=generator) for heads in (4, 2))
    grads = [torch.randn(x.shape, generator=generator) for x in (q, k)]
    found, expected = (
        rotated(kernel, (q, k), turns, grads) for kernel in (rotary_embedding, reference.rotary_embedding)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def rotated(
    kernel: Callable[..., Angles], heads: tuple[Tensor, Tensor], angles: Angles, grads: list[Tensor]
) -> tuple[Tensor, ...]:
    """Return rotated queries and keys, and their gradients."""
    inputs = [x.clone().requires_grad_() for x in heads]
    outputs = kernel(*inputs, *angles)
    return (*outputs, *torch.autograd.grad(outputs, inputs, grads))
