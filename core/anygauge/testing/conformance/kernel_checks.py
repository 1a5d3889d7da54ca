"""Evaluate a kernel and the float64 reference on the same tensors, and compare them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anygauge.kernels.table import KernelTable, reference_kernel
from anygauge.testing.conformance.kernel_cases import Case
from anygauge.testing.conformance.tolerances import (
    AVERAGE,
    EXACT,
    ROUNDED_ONCE,
    TOLERANCES,
    exceeds,
    tolerance_of,
)
from anygauge_hooks.kernels import KernelImpl, Tolerance
from anygauge_hooks.types import Device

__all__ = [
    "LAYOUTS",
    "Layout",
    "Result",
    "assert_close",
    "assert_same_bits",
    "call",
    "check_kernel",
    "compare",
    "contiguous",
    "cotangents",
    "evaluate",
    "expect",
    "gradients",
    "inputs_of",
    "kernels_for",
    "leaves",
    "leaves_inputs_alone",
    "leaves_process_alone",
    "on_host",
]

Layout = Callable[[Tensor], Tensor]
VANISHING = 1e-12
"""Part of another tensor's values below which float64 has nothing but its rounding."""

DEVICE_STATE = "the random state of the device"

ENOUGH = 64
"""Elements from which on the average error of a tensor means something."""


@dataclass(frozen=True)
class Result:
    """Outputs of a call, and the gradients of its inputs."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


# -------------------------------------------------------------------------
# Inputs
# -------------------------------------------------------------------------


def contiguous(x: Tensor) -> Tensor:
    """Return a copy in memory of its own."""
    return x.clone(memory_format=torch.contiguous_format)


def padded(x: Tensor) -> Tensor:
    """Return the same values inside of wider rows, as a part of a fused projection is.

    It begins where no wide load can, and beside it is what must be neither read nor written.
    """
    filler = torch.nan if x.is_floating_point() else 1
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), filler, dtype=x.dtype, device=x.device)
    wide[..., 1 : x.shape[-1] + 1] = x
    return wide[..., 1 : x.shape[-1] + 1]


def transposed(x: Tensor) -> Tensor:
    """Return the same values with the strides of the first and the last dimension exchanged."""
    return x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)


LAYOUTS: Mapping[str, Layout] = {"contiguous": contiguous, "padded": padded, "transposed": transposed}


def inputs_of(case: Case, dtype: str, layout: Layout, device: Device, seed: int = 0) -> list[Tensor]:
    """Return the tensors of a case on a device, rounded to a dtype."""
    return _inputs(case, dtype, layout, device.torch_device, seed)


def _inputs(case: Case, dtype: str, layout: Layout, where: torch.device, seed: int) -> list[Tensor]:
    # the host's alone: torch.manual_seed also keeps the stack of its caller for every kind of device
    torch.default_generator.manual_seed(seed)
    placed: list[Tensor] = []
    for index, x in enumerate(case.tensors()):
        is_narrow = index < case.differentiable and index not in case.wide
        kind = getattr(torch, dtype) if is_narrow else torch.float32
        target = torch.device("cpu") if index in case.on_host else where
        placed.append(layout(x.to(target, kind if x.is_floating_point() else x.dtype)))
    return placed


def kernels_for(kernels: KernelTable, case: Case, dtype: str, *, reference: bool = True) -> list[KernelImpl]:
    """Return what may serve a case in a dtype, once each.

    What a module gets comes first: an op may be made of kernels of other ops. A kernel is tried on a large
    case in one dtype.

    :param reference: Whether the reference is among them where a plugin serves the case, too.
    """
    served = kernels.candidates(case.op, dtype=dtype, **case.facts)
    resolved = kernels.resolve(case.op, dtype=dtype, **case.facts)
    last = reference_kernel(case.op)
    if all(resolved is not kernel.fn for kernel in [*served, last]):
        parts = replace(last, fn=resolved, source=f"{case.op} of its parts")
        served = [parts, *(kernel for kernel in served if kernel.fn is not last.fn)]
    if all(last.fn is not kernel.fn for kernel in served) and (reference or not served):
        served.append(last)
    if case.in_one_dtype:
        return [kernel for kernel in served if dtype == _main_dtype(kernel)]
    return [kernel for kernel in served if dtype in kernel.dtypes]


def _main_dtype(kernel: KernelImpl) -> str:
    return "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0]


# -------------------------------------------------------------------------
# Evaluation
# -------------------------------------------------------------------------


def call(fn: Callable[..., Any], case: Case, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Call an op and check the kinds of its outputs."""
    named = {} if case.keyword is None else {case.keyword: tensors[-1]}
    given = tensors[: len(tensors) - len(named)]
    result = fn(*given, *case.arguments, **case.options, **named)
    outputs = result if isinstance(result, tuple) else (result,)
    narrow = tensors[0].dtype
    wide = torch.promote_types(narrow, torch.float32)
    for index, output in enumerate(outputs):
        assert output.device == tensors[0].device, f"output {index} of {case} is on {output.device}"
        if output.is_floating_point():
            wanted = wide if index in case.wide_outputs else narrow
            assert output.dtype == wanted, f"output {index} of {case} is {output.dtype}, not {wanted}"
    return case.settle(*outputs)


def cotangents(outputs: Sequence[Tensor], layout: Layout = contiguous) -> list[Tensor]:
    """Return gradients of outputs that depend on their shapes alone."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    return [layout(x.to(out.device, out.dtype)) for x, out in zip(drawn, outputs, strict=True)]


def evaluate(
    fn: Callable[..., Any], case: Case, tensors: Sequence[Tensor], layout: Layout = contiguous
) -> Result:
    """Return outputs and gradients.

    :param layout: Layout of the gradients of the outputs.
    """
    inputs = leaves(case, tensors)
    outputs = call(fn, case, inputs)
    return Result(outputs, gradients(inputs, outputs, layout))


def leaves(case: Case, tensors: Sequence[Tensor], only: int | None = None) -> list[Tensor]:
    """Return the same tensors, of which the first want a gradient, or only one of them."""
    inputs = [x.detach() for x in tensors]
    for index, x in enumerate(inputs[: case.differentiable]):
        x.requires_grad_(only is None or index == only)
    return inputs


def gradients(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    layout: Layout = contiguous,
    only: int | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs that want one.

    :param layout: Layout of the gradients of the outputs.
    :param only: Index of the one output that has a gradient; by default, all have that can.
    """
    chosen = [i for i, out in enumerate(outputs) if out.requires_grad and only in (None, i)]
    given = [cotangents(outputs, layout)[i] for i in chosen]
    before = [x.clone() for x in given]
    results = torch.autograd.grad(
        [outputs[i] for i in chosen],
        [x for x in inputs if x.requires_grad],
        given,
        materialize_grads=only is not None,
    )
    for now, then in zip(given, before, strict=True):
        assert torch.equal(now, then), "the gradient of an output was overwritten"
    return results


def expect(case: Case, tensors: Sequence[Tensor], layout: Layout = contiguous) -> Result:
    """Return what the float64 reference makes of the tensors that the kernel sees, rounded to its dtype."""
    return evaluate(reference_kernel(case.op).fn, case, on_host(tensors), layout)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the host, in float64 where they are floating-point numbers."""
    return [x.cpu().double() if x.is_floating_point() else x.cpu() for x in tensors]


@lru_cache(maxsize=1)
def expected_result(case: Case, dtype: str, where: torch.device) -> Result:
    """Evaluate the reference once for all kernels of a case: the values are the same."""
    return expect(case, _inputs(case, dtype, contiguous, where, 0))


# -------------------------------------------------------------------------
# Comparison
# -------------------------------------------------------------------------


def check_kernel(kernel: KernelImpl, case: Case, dtype: str, layout: Layout, device: Device) -> None:
    """Compare one implementation with the float64 reference."""
    inputs = inputs_of(case, dtype, layout, device)
    expected = expected_result(case, dtype, device.torch_device)
    with leaves_inputs_alone(kernel, case, inputs), leaves_process_alone(kernel, device):
        actual = evaluate(kernel.fn, case, inputs, layout)
    compare(kernel, case, dtype, actual, expected)


def compare(kernel: KernelImpl, case: Case, dtype: str, actual: Result, expected: Result) -> None:
    """Fail if results differ by more than the kernel's tolerance, in an element or on average."""
    for kind in ("outputs", "gradients"):
        pairs = zip(getattr(actual, kind), getattr(expected, kind), strict=True)
        beside = max(map(_largest, getattr(expected, kind)), default=0.0)
        for index, (result, wanted) in enumerate(pairs):
            what = f"{kernel.source}: {kind[:-1]} {index} of {case} in {dtype}"
            tolerance = tolerance_of(kernel, dtype)
            if kind == "outputs":
                same = result.requires_grad == wanted.requires_grad
                assert same, f"{what} has requires_grad={result.requires_grad}"
                tolerance = EXACT if _is_exact(case, dtype, index) else tolerance
            assert_close(result, wanted, tolerance, what, beside)
            if kind == "outputs" and index in case.wide_outputs:
                assert_not_narrowed(result, wanted, dtype, what)
            if not exceeds(tolerance_of(kernel, dtype), TOLERANCES[dtype]):
                average = (ROUNDED_ONCE if kind in case.rounded_once else AVERAGE)[dtype]
                assert_close_on_average(result, wanted, average, what, beside)


def _is_exact(case: Case, dtype: str, output: int) -> bool:
    return dtype != "float32" and output in case.exact_outputs


def assert_close(
    actual: Tensor, expected: Tensor, tolerance: Tolerance, what: str, beside: float = 0.0
) -> None:
    """Compare a tensor with what it should be.

    :param beside: The largest value of the tensors that came with it. One that vanishes beside them, such as
        the gradient of a query that sees one key, is a difference of their size, and as exact as they are.
    """
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    relative, absolute = tolerance
    actual, expected = (x.detach().cpu().double() for x in (actual, expected))
    largest = _largest(expected)
    largest = beside if largest <= VANISHING * beside else largest
    torch.testing.assert_close(
        actual,
        expected,
        rtol=relative,
        atol=absolute * largest,
        msg=lambda text: f"{what}\n{text}",
    )


def assert_close_on_average(
    actual: Tensor, expected: Tensor, average: float, what: str, beside: float = 0.0
) -> None:
    """Compare the root mean square of the error with that of the values."""
    actual, expected = (x.detach().cpu().double() for x in (actual, expected))
    if expected.numel() < ENOUGH or _largest(expected) <= VANISHING * beside:
        return
    error = (torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)).item()
    assert error <= average, f"{what}: the error is {error:.2g} of the values on average, not {average:.2g}"


def assert_not_narrowed(actual: Tensor, expected: Tensor, dtype: str, what: str) -> None:
    """Fail if every number of a float32 output is one of a narrower dtype, and those expected are not."""
    narrow = getattr(torch, dtype)
    if actual.numel() >= ENOUGH and not torch.equal(expected.to(narrow).double(), expected.double()):
        rounded = actual.detach().to(narrow).to(actual.dtype)
        assert dtype == "float32" or not torch.equal(rounded, actual), f"{what} was rounded to {dtype}"


def assert_same_bits(one: Result, other: Result, what: str) -> None:
    """Fail if two results are not equal to the bit."""
    for kind in ("outputs", "gradients"):
        for index, pair in enumerate(zip(getattr(one, kind), getattr(other, kind), strict=True)):
            assert torch.equal(*pair), f"{what}: {kind[:-1]} {index} has other bits"


def _largest(x: Tensor) -> float:
    return x.detach().double().abs().max().item() if x.numel() else 0.0


# -------------------------------------------------------------------------
# Side effects
# -------------------------------------------------------------------------


@contextmanager
def leaves_inputs_alone(kernel: KernelImpl, case: Case, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Fail if the block changes the inputs, or the memory beside them."""
    first = 1 if case.op == "vocab_parallel_logprob" else 0  # logits may be overwritten
    memory = [x if x._base is None else x._base for x in inputs[first:]]
    before = [_bits(x) for x in memory]
    yield
    for index, (now, then) in enumerate(zip(memory, before, strict=True), first):
        assert torch.equal(_bits(now), then), f"{kernel.source} overwrites argument {index} in {case}"


def _bits(x: Tensor) -> Tensor:
    copy = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copy.view(-1).view(torch.uint8)


@contextmanager
def leaves_process_alone(kernel: KernelImpl, device: Device) -> Iterator[None]:
    """Fail if the block draws random numbers, or changes a setting of torch."""
    declared = {DEVICE_STATE} if kernel.advances_rng else set()
    before = _process_state(device)
    yield
    after = _process_state(device)
    changed = [name for name in after if after[name] != before[name] and name not in declared]
    assert not changed, f"{kernel.source} changed {', '.join(changed)}"


def _process_state(device: Device) -> dict[str, Any]:
    drawn = np.random.get_state(legacy=False)["state"]
    return {
        "the random state of the host": torch.get_rng_state().numpy().tobytes(),
        DEVICE_STATE: device.get_rng_state().numpy().tobytes(),
        "Python's random state": random.getstate(),
        "NumPy's random state": (drawn["key"].tobytes(), drawn["pos"]),
        "the default dtype": torch.get_default_dtype(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
        "whether gradients are recorded": torch.is_grad_enabled(),
    }
