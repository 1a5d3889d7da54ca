"""Attention in parts and over long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anygauge.kernels.table import KernelTable
from anygauge.testing.conformance.kernel_cases.attention import attention_case
from anygauge.testing.conformance.kernel_checks import (
    Result,
    assert_close,
    call,
    compare,
    contiguous,
    cotangents,
    expect,
    inputs_of,
    kernels_for,
    leaves,
)
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_hooks.types import Device

pytestmark = pytest.mark.conformance

LENGTHS, LAST = (2_048, 4_300), 40
"""Tokens of long sequences, and those at their ends that are compared: their scores are not many."""


def cut(x: Tensor, before: Sequence[int], own: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the first part of every packed sequence, and the rest."""
    parts = torch.split(x, [size for pair in zip(before, own, strict=True) for size in pair])
    return torch.cat(parts[::2]), torch.cat(parts[1::2])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_attention_to_parts_of_the_keys_merges_into_the_whole(
    kernels: KernelTable, device: Device, dtype: str
) -> None:
    """The rest of each sequence attends to its first part and to itself, one after the other."""
    before, own, width, scale = (5, 1, 140), (7, 1, 60), 32, 0.25
    lengths = tuple(map(sum, zip(before, own, strict=True)))
    case = attention_case("whole", lengths, width=width, causal=True, scale=scale)
    q, k, v = inputs_of(case, dtype, contiguous, device)
    _, expected = cut(expect(case, (q, k, v)).outputs[0], before, own)
    (_, queries), (far_keys, near_keys), (far_values, near_values) = (cut(x, before, own) for x in (q, k, v))
    facts = {
        "head_dim": width,
        "value_dim": width,
        "return_lse": True,
        "has_window": False,
        "has_sinks": False,
    }
    far, near = (
        kernels.resolve("varlen_attention", dtype=dtype, causal=causal, **facts) for causal in (False, True)
    )
    outputs, sums = zip(
        far(queries, far_keys, far_values, own, scale, causal=False, key_lengths=before, return_lse=True),
        near(queries, near_keys, near_values, own, scale, causal=True, return_lse=True),
        strict=True,
    )
    shares = torch.stack(sums).softmax(0).unsqueeze(-1)
    merged = (torch.stack(outputs).float() * shares).sum(0)
    assert_close(merged, expected, TOLERANCES[dtype], "merged attention")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_end_of_a_long_sequence_sees_its_beginning(
    kernels: KernelTable, device: Device, dtype: str, length: int
) -> None:
    """The last queries of a sequence are those of a case that has no others, with the same gradients."""
    case = attention_case("long", (length, 3), 1, 1, 16, causal=True, scale=0.2)
    case = replace(case, in_one_dtype=True)
    last = attention_case("end", (LAST,), 1, 1, 16, causal=True, scale=0.2, key_lengths=(length,))
    for kernel in kernels_for(kernels, case, dtype, reference=False):
        inputs = inputs_of(case, dtype, contiguous, device)
        ends = [inputs[0][length - LAST : length], *(x[:length] for x in inputs[1:])]
        expected = expect(last, ends)
        given = leaves(case, inputs)
        output = call(kernel.fn, case, given)[0]
        gradient = torch.zeros_like(output)
        gradient[length - LAST : length] = cotangents(expected.outputs)[0].to(output)
        queries, keys, values = torch.autograd.grad(output, given, gradient)
        actual = Result(
            (output[length - LAST : length],),
            (queries[length - LAST : length], keys[:length], values[:length]),
        )
        compare(kernel, last, dtype, actual, expected)
