"""Limits, dtypes and tolerances of kernels are as declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from anygauge.kernels.table import KernelTable, core_kernels, reference_kernel
from anygauge.testing.conformance.kernel_cases import CASES, FROM_FACTS, Case
from anygauge.testing.conformance.kernel_cases.experts import MOST_EXPERTS
from anygauge.testing.conformance.kernel_checks import LAYOUTS, check_kernel, kernels_for
from anygauge.testing.conformance.tolerances import CAPS, TOLERANCES, exceeds
from anygauge.testing.plugin import REPORTED
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl, KernelOp
from anygauge_hooks.types import Device

pytestmark = pytest.mark.conformance

FEW = 8
"""Values of a limit that are all tried; of more, the ends and some between."""

LARGEST = MOST_EXPERTS
"""Values above are not tried."""

SIZES = (4, 12, 24, 48, 64, 72, 80, 96, 128, 192, 256, 320, 384, 512, 576)
"""Sizes of heads and numbers of experts of models, and some in between."""

Facts = Mapping[str, Any]


def kernels_of(kernels: KernelTable, op: KernelOp) -> list[KernelImpl]:
    """Return every kernel of an op, but for those of the core."""
    ours = {kernel.source for kernel in core_kernels()}
    return [owned.kernel for owned in kernels.kernels.get(op, ()) if owned.kernel.source not in ours]


def tried(allowed: Sequence[Any]) -> list[Any]:
    """Return the values of a limit to try."""
    assert allowed, "a limit allows no value"
    if len(allowed) <= FEW or not all(type(value) is int for value in allowed):
        return list(allowed)
    known = [value for value in allowed if value <= LARGEST]
    middle = [value for value in SIZES if value in allowed]
    return sorted({known[0], *known[1:2], *known[-2:], *middle})


def beyond(allowed: Sequence[Any]) -> list[int]:
    """Return the values next to the ends of a limit that are not allowed."""
    numbers = [value for value in allowed if type(value) is int]
    ends = (min(numbers) - 1, max(numbers) + 1) if numbers else ()
    return [value for value in ends if 1 <= value <= LARGEST and value not in allowed]


def fitted(facts: Facts, limits: Mapping[str, Sequence[Any]]) -> Facts:
    """Return facts that are within all limits."""
    return {n: x if x in limits.get(n, (x,)) else tried(limits[n])[0] for n, x in facts.items()}


def variants(op: KernelOp, kernel: KernelImpl, values: Any) -> Iterator[tuple[str, Any, list[Case]]]:
    """Yield each value of each limit, with the cases that have it; other facts are within their limits."""
    limits = kernel.limits or {}
    bases = [fitted(case.facts, limits) for case in CASES if case.op == op]
    for name, allowed in limits.items():
        for number, value in enumerate(values(allowed)):
            facts = [{**base, name: value} for base in bases[number % len(bases) :] + bases]
            yield name, value, [case for case in map(FROM_FACTS[op], facts) if case is not None]


@pytest.mark.parametrize("op", FROM_FACTS)
def test_a_kernel_works_at_its_limits(kernels: KernelTable, device: Device, op: KernelOp) -> None:
    for kernel in kernels_of(kernels, op):
        for number, (name, value, cases) in enumerate(variants(op, kernel, tried)):
            dtype = kernel.dtypes[number % len(kernel.dtypes)]
            for case in cases[:1]:
                assert kernel in kernels.candidates(op, dtype=dtype, **case.facts), f"{name} {value}"
                check_kernel(kernel, case, dtype, [*LAYOUTS.values()][number % len(LAYOUTS)], device)


@pytest.mark.parametrize("op", FROM_FACTS)
def test_beyond_its_limits_another_one_serves(kernels: KernelTable, device: Device, op: KernelOp) -> None:
    for kernel in kernels_of(kernels, op):
        for _, _, cases in variants(op, kernel, beyond):
            for case in cases[:1]:
                served = kernels_for(kernels, case, kernel.dtypes[0]) or [reference_kernel(op)]
                assert kernel not in served
                check_kernel(served[0], case, kernel.dtypes[0], LAYOUTS["contiguous"], device)


def test_every_kernel_is_tried(kernels: KernelTable) -> None:
    """One that serves no case passes every other test."""
    tested = set()
    for case in CASES:
        for dtype in TOLERANCES:
            tested |= {id(kernel) for kernel in kernels_for(kernels, case, dtype)}
    for op in KERNEL_OPS:
        for kernel in kernels_of(kernels, op):
            reached = op in FROM_FACTS and any(cases for _, _, cases in variants(op, kernel, tried))
            assert id(kernel) in tested or reached, f"no case for {kernel.source} of {op}"


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_dtypes_are_those_that_the_suite_has(kernels: KernelTable, op: KernelOp) -> None:
    for kernel in kernels_of(kernels, op):
        unknown = set(kernel.dtypes) - set(TOLERANCES)
        assert kernel.dtypes, f"{kernel.source} of {op} declares no dtype"
        assert not unknown, f"{kernel.source} of {op} declares {unknown}; the suite has {set(TOLERANCES)}"


@pytest.mark.parametrize("op", KERNEL_OPS)
def test_a_wider_tolerance_has_a_reason_and_an_end(
    kernels: KernelTable, op: KernelOp, record_property: Callable[[str, object], None]
) -> None:
    for kernel in kernels_of(kernels, op):
        for dtype, tolerance in (kernel.tolerance or {}).items():
            declared = f"{kernel.source} of {op} declares a tolerance of {tolerance} in {dtype}"
            record_property(REPORTED, f"{declared}: {kernel.tolerance_reason or 'no reason given'}")
            assert dtype in TOLERANCES, f"{declared}; the suite has {set(TOLERANCES)}"
            limit = CAPS[dtype]
            assert not exceeds(tolerance, limit), f"{declared}, and {limit} is the most that passes"
            is_wider = exceeds(tolerance, TOLERANCES[dtype])
            assert kernel.tolerance_reason or not is_wider, f"{declared} without a tolerance_reason"
