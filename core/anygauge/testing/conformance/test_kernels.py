"""Every kernel agrees with the float64 reference, forward and backward, in every dtype that it declares."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from anygauge.kernels.table import KernelTable
from anygauge.testing.conformance.kernel_cases import CASES, Case
from anygauge.testing.conformance.kernel_checks import (
    LAYOUTS,
    call,
    check_kernel,
    contiguous,
    evaluate,
    inputs_of,
    kernels_for,
)
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_hooks.kernels import KERNEL_FACTS, KERNEL_OPS
from anygauge_hooks.types import Device

pytestmark = pytest.mark.conformance


def numbered() -> list[tuple[Case, str, str, bool]]:
    """Return each case in each dtype, with a layout and whether it is checked without gradients, too.

    Layouts alternate over the cases of an op, shifted for each dtype, so that each op has each layout in each
    dtype, and each case has several.
    """
    seen: Counter[str] = Counter()
    rows = []
    for case in CASES:
        number = seen[case.op]
        seen[case.op] += 1
        for shift, dtype in enumerate(TOLERANCES):
            layout = [*LAYOUTS][(number + shift) % len(LAYOUTS)]
            rows.append((case, dtype, layout, (number + shift) % 2 == 0))
    return rows


def test_cases_state_every_fact_of_their_op() -> None:
    """A kernel that limits a fact would else never be tried."""
    assert not [str(case) for case in CASES if set(case.facts) != set(KERNEL_FACTS[case.op])]
    assert {case.op for case in CASES} == set(KERNEL_OPS)
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case}-{dtype}")
        for case, dtype, _, is_chosen in numbered()
        if is_chosen and not case.in_one_dtype and case.op != "vocab_parallel_logprob"
    ],
)
def test_without_a_gradient_the_output_is_the_same(
    kernels: KernelTable, device: Device, case: Case, dtype: str
) -> None:
    """Caches made in inference mode must do for recorded calls, so that this comes before other tests."""
    inputs = inputs_of(case, dtype, contiguous, device)
    for kernel in kernels_for(kernels, case, dtype, reference=False):
        with torch.inference_mode():
            silent = call(kernel.fn, case, inputs)
        loud = evaluate(kernel.fn, case, inputs).outputs
        for one, other in zip(silent, loud, strict=True):
            assert not one.requires_grad
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("case", "dtype", "layout", "with_reference"),
    [pytest.param(*row, id=f"{row[0]}-{row[1]}-{row[2]}") for row in numbered()],
)
def test_agrees_with_the_reference(
    kernels: KernelTable, device: Device, case: Case, dtype: str, layout: str, with_reference: bool
) -> None:
    for kernel in kernels_for(kernels, case, dtype, reference=with_reference):
        check_kernel(kernel, case, dtype, LAYOUTS[layout], device)
