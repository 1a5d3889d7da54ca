"""Calls of a kernel are independent of each other, of the layout of gradients and of who asks for which."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from anygauge.kernels.table import KernelTable, reference_kernel
from anygauge.plugins import Plugins
from anygauge.testing.conformance.kernel_cases import FIRST, Case
from anygauge.testing.conformance.kernel_cases.elementwise import add_norm_case
from anygauge.testing.conformance.kernel_checks import (
    Result,
    assert_same_bits,
    call,
    compare,
    contiguous,
    evaluate,
    expect,
    gradients,
    inputs_of,
    kernels_for,
    leaves,
    leaves_inputs_alone,
    on_host,
    transposed,
)
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl, KernelOp
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

OVERWRITES = "vocab_parallel_logprob"
"""The op that may overwrite its input."""

HIDES = "topk_router"
"""The op that has no choice among scores that are not numbers."""

PATIENCE_S = 10
"""Time in which a device releases memory after the last work that reads it."""

Served = list[KernelImpl]


@pytest.fixture(params=KERNEL_OPS)
def case(request: pytest.FixtureRequest) -> Case:
    """Return one case of each op."""
    op: KernelOp = request.param
    return FIRST[op]


@pytest.fixture(params=TOLERANCES)
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def served(kernels: KernelTable, case: Case, dtype: str) -> Served:
    """Return the kernels of the case, or the reference where there is none."""
    return kernels_for(kernels, case, dtype, reference=False)


@pytest.fixture
def deterministic(plugins: Plugins, backend: BackendSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set up the process as a worker of a deterministic run."""

    def environment(deterministic: bool) -> dict[str, str]:
        return plugins.worker_env(
            backend,
            role="train",
            deterministic=deterministic,
            interface=None,
            ip_version="any",
            timeout_s=600,
        )

    for name, value in environment(True).items():
        if environment(False).get(name) != value:
            monkeypatch.setenv(name, value)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def repeated(x: Tensor) -> Tensor:
    """Return a tensor of which all parts along the first dimension are the first one, in its memory."""
    return x[:1].expand_as(x)


def are_freed(memory: list[StorageWeakRef], device: Device) -> bool:
    """Return whether memory is freed in the end: a device may hold what queued work reads for a while."""
    deadline = time.monotonic() + PATIENCE_S
    while kept := [storage for storage in memory if not storage.expired()]:  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            return False
        memory = kept
        device.synchronize()
        time.sleep(0.01)
    return True


def test_two_calls_may_be_under_way(served: Served, case: Case, dtype: str, device: Device) -> None:
    """The second call overwrites nothing of the first one, which goes backward last."""
    for kernel in served:
        given = [inputs_of(case, dtype, contiguous, device, seed) for seed in (0, 1)]
        expected = [expect(case, tensors) for tensors in given]
        inputs = [leaves(case, tensors) for tensors in given]
        outputs = [call(kernel.fn, case, tensors) for tensors in inputs]
        second = Result(outputs[1], gradients(inputs[1], outputs[1]))
        first = Result(outputs[0], gradients(inputs[0], outputs[0]))
        compare(kernel, case, dtype, first, expected[0])
        compare(kernel, case, dtype, second, expected[1])


def test_memory_and_lengths_may_have_new_values(
    served: Served, case: Case, dtype: str, device: Device
) -> None:
    """The second call is given the same objects with other contents, and the same shapes."""
    lengths = [list(x) for x in case.arguments if isinstance(x, tuple)]
    rest = case.arguments[len(lengths) :]
    reused = replace(case, arguments=(*lengths, *rest))
    for kernel in served:
        memory = inputs_of(case, dtype, contiguous, device)
        evaluate(kernel.fn, reused, memory)
        for old, new in zip(memory, inputs_of(case, dtype, contiguous, device, seed=1), strict=True):
            old.copy_(new.flip(0) if new.dim() == 1 and not new.is_floating_point() else new)
        for sizes in lengths:
            sizes.reverse()
        expected = expect(reused, memory)
        compare(kernel, case, dtype, evaluate(kernel.fn, reused, memory), expected)


def test_numbers_may_change_from_call_to_call(served: Served, case: Case, dtype: str, device: Device) -> None:
    """The second call is given tensors of the same shapes, and another epsilon, scale or temperature."""
    changed = replace(
        case,
        arguments=tuple(map(_lowered, case.arguments)),
        options={name: _lowered(value) for name, value in case.options.items()},
    )
    inputs = inputs_of(case, dtype, contiguous, device)
    for kernel in served:
        for each in (case, changed):
            actual = evaluate(kernel.fn, each, [x.clone() for x in inputs])
            compare(kernel, each, dtype, actual, expect(each, inputs))


def _lowered(value: object) -> object:
    return 0.6 * value if isinstance(value, float) else value


def test_each_input_may_want_the_only_gradient(
    served: Served, case: Case, dtype: str, device: Device
) -> None:
    inputs = inputs_of(case, dtype, contiguous, device)
    whole = expect(case, inputs)
    for kernel in served:
        for index in range(case.differentiable):
            given = leaves(case, [x.clone() for x in inputs], only=index)
            alone = gradients(given, call(kernel.fn, case, given))
            wanted = Result((), whole.gradients[index : index + 1])
            compare(kernel, case, dtype, Result((), alone), wanted)


def test_each_output_may_have_the_only_gradient(
    served: Served, case: Case, dtype: str, device: Device
) -> None:
    inputs = inputs_of(case, dtype, contiguous, device)

    def alone(fn: Callable[..., object], tensors: list[Tensor], index: int) -> Result:
        given = leaves(case, tensors)
        return Result((), gradients(given, call(fn, case, given), only=index))

    outputs = expect(case, inputs).outputs
    for index in [i for i, out in enumerate(outputs) if out.requires_grad and len(outputs) > 1]:
        expected = alone(reference_kernel(case.op).fn, on_host(inputs), index)
        for kernel in served:
            compare(kernel, case, dtype, alone(kernel.fn, [x.clone() for x in inputs], index), expected)


def test_rows_may_be_one_row_in_memory(served: Served, case: Case, dtype: str, device: Device) -> None:
    """A gradient is so, too, after a sum."""
    inputs = inputs_of(case, dtype, contiguous, device)
    count = case.differentiable
    if case.op != OVERWRITES:
        inputs[:count] = [repeated(x) for x in inputs[:count]]
    expected = expect(case, inputs, repeated)
    for kernel in served:
        given = [x.clone() for x in inputs] if case.op == OVERWRITES else inputs
        with leaves_inputs_alone(kernel, case, given):
            compare(kernel, case, dtype, evaluate(kernel.fn, case, given, repeated), expected)


def test_a_deterministic_run_has_the_same_bits_twice(
    deterministic: None, served: Served, case: Case, dtype: str, device: Device
) -> None:
    """Torch then also fills new memory with what is not a number, and nothing of that is left."""
    inputs = inputs_of(case, dtype, transposed, device)
    expected = expect(case, inputs)
    for kernel in served:
        first, *others = (evaluate(kernel.fn, case, [x.clone() for x in inputs]) for _ in range(3))
        compare(kernel, case, dtype, first, expected)
        for other in others:
            assert_same_bits(first, other, f"{kernel.source} in {dtype}")


def test_nan_reaches_the_outputs(served: Served, case: Case, dtype: str, device: Device) -> None:
    if case.op == HIDES:
        return
    inputs = inputs_of(case, dtype, contiguous, device)
    inputs[0].view(-1)[5] = torch.nan
    for kernel in served:
        with torch.no_grad():
            outputs = call(kernel.fn, case, [x.clone() for x in inputs])
        assert any(bool(out.isnan().any()) for out in outputs if out.is_floating_point()), kernel.source


def test_a_call_keeps_no_tensor(served: Served, case: Case, dtype: str, device: Device) -> None:
    for kernel in served:
        inputs = inputs_of(case, dtype, contiguous, device)
        result = evaluate(kernel.fn, case, inputs)
        floats = [x for x in (*inputs, *result.outputs, *result.gradients) if x.is_floating_point()]
        memory = [StorageWeakRef(x.untyped_storage()) for x in floats]  # type: ignore[no-untyped-call]
        del inputs, result, floats
        assert are_freed(memory, device), f"{kernel.source} keeps a tensor"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("adds", [True, False])
def test_a_fused_norm_is_the_norm_of_the_sum(
    kernels: KernelTable, device: Device, dtype: str, adds: bool
) -> None:
    """The sum is rounded before the norm: a layer that makes its input again has that alone."""
    case = add_norm_case(40, 720, eps=0.3, adds=adds)
    inputs = inputs_of(case, dtype, contiguous, device)
    norm = kernels.resolve("rms_norm", dtype=dtype)
    for kernel in kernels_for(kernels, case, dtype, reference=False):
        total, normed = call(kernel.fn, case, inputs)
        assert torch.equal(total, sum(inputs[2:], start=inputs[0]))
        same = (normed == norm(total, inputs[1], *case.arguments)).double().mean().item()
        assert same > 0.95, f"{kernel.source}: {1 - same:.0%} of the norm are not the norm of the sum"
