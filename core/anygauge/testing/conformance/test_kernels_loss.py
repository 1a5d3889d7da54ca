"""The output layer's gradient is where Megatron looks for it, and no tensor has all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anygauge.kernels.table import KernelTable, reference_kernel
from anygauge.testing.conformance.kernel_cases.logprob import linear_logprob_case
from anygauge.testing.conformance.kernel_checks import (
    assert_close,
    call,
    contiguous,
    cotangents,
    evaluate,
    expect,
    gradients,
    inputs_of,
)
from anygauge.testing.conformance.tolerances import TOLERANCES, tolerance_of
from anygauge_hooks.types import Device

pytestmark = pytest.mark.conformance

LOGITS = {"cpu": (1024, 4096)}
"""Tokens and vocabulary of a case whose logits are large beside the memory of a tile, on a device ..."""

OTHER_LOGITS = (1024, 49_152)
"""... and on any other one, where tiles are larger: 192 MiB."""

PART = 0.75
"""Part of the memory of all logits, in float32, that the op may take at once."""


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Record the size of the largest tensor that an operator of torch returns.

    It sees neither memory that an operator has for itself nor what is allocated without torch.
    """

    size: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        storages = [x.untyped_storage().nbytes() for x in tensors if type(x) is Tensor and not x.is_sparse]
        self.size = max([self.size, *storages])
        return result


def extra_memory(device: Device, work: Callable[[], object]) -> int:
    """Return the memory that work takes; on the host, where others' counts, that of its largest tensor."""
    if device.torch_device.type == "cpu" or device.peak_memory(reset=True) is None:
        largest = Largest()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with largest:
            work()
        return largest.size
    before = device.memory()["allocated"]
    work()
    peak = device.peak_memory()
    assert peak is not None
    return peak - before


def test_no_tensor_has_all_logits(kernels: KernelTable, device: Device) -> None:
    tokens, vocab = LOGITS.get(device.torch_device.type, OTHER_LOGITS)
    case = linear_logprob_case(tokens, 8, vocab, 0.8, entropy_grad=True)
    inputs = inputs_of(case, "float32", contiguous, device)
    few = [inputs[0][:8], inputs[1], inputs[2][:8]]
    for kernel in kernels.candidates(case.op, dtype="float32"):
        evaluate(kernel.fn, case, few)  # allocates workspaces
        size = extra_memory(device, lambda: evaluate(kernel.fn, case, inputs))  # noqa: B023 - called at once
        assert size <= PART * 4 * tokens * vocab, f"{kernel.source} takes {size} bytes"


def megatron_weight(values: Tensor) -> tuple[Any, list[bool]]:
    """Return a weight as Megatron has it, and the marks that its hooks will have seen."""
    weight: Any = torch.nn.Parameter(values.clone())
    weight.main_grad = torch.linspace(-1, 1, values.numel(), device=values.device).view_as(values)
    weight.grad_added_to_main_grad = False
    marks: list[bool] = []
    weight.register_post_accumulate_grad_hook(lambda x: marks.append(x.grad_added_to_main_grad))
    return weight, marks


@pytest.mark.parametrize(("tokens", "vocab"), [(37, 50), (1030, 1300)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_linear_logprob_adds_to_main_grad(
    kernels: KernelTable, device: Device, dtype: str, tokens: int, vocab: int
) -> None:
    """Once in each of two micro-batches; marks are set before the weight's hooks run, and stay."""
    case = linear_logprob_case(tokens, 24, vocab, 0.7, entropy_grad=True, padding=3)
    _, values, targets = inputs_of(case, dtype, contiguous, device)
    for kernel in kernels.candidates(case.op, dtype=dtype):
        what, tolerance = f"{kernel.source} in {dtype}", tolerance_of(kernel, dtype)
        weight, marks = megatron_weight(values)
        start, total = weight.main_grad.clone(), torch.zeros(values.shape, dtype=torch.float64)
        for seed in (0, 1):
            hidden: Any = inputs_of(case, dtype, contiguous, device, seed)[0]
            expected = expect(case, [hidden, values, targets]).gradients
            outputs = call(kernel.fn, case, [hidden.requires_grad_(), weight, targets])
            torch.autograd.backward(outputs, cotangents(outputs))
            assert_close(hidden.grad, expected[0], tolerance, f"{what}: the hidden states' gradient")
            total += expected[1]
            marks.append(weight.grad_added_to_main_grad)
            weight.grad, weight.grad_added_to_main_grad = None, False
        assert marks == [True] * 4, f"{what}: grad_added_to_main_grad was {marks} in and after backward"
        assert_close(weight.main_grad - start, total, tolerance, f"{what}: main_grad")


def test_main_grad_may_be_bfloat16(kernels: KernelTable, device: Device) -> None:
    """``train.megatron.grad_reduce_in_fp32 = false`` makes it so."""
    case = linear_logprob_case(37, 24, 50, 0.7, entropy_grad=True, padding=3)
    inputs = inputs_of(case, "bfloat16", contiguous, device)
    expected = expect(case, inputs).gradients[1]
    for kernel in kernels.candidates(case.op, dtype="bfloat16"):
        weight, _ = megatron_weight(inputs[1])
        weight.main_grad = weight.main_grad.bfloat16()
        total = weight.main_grad.cpu().double() + expected
        outputs = call(kernel.fn, case, [inputs[0].detach().requires_grad_(), weight, inputs[2]])
        torch.autograd.backward(outputs, cotangents(outputs))
        assert weight.grad_added_to_main_grad
        assert_close(weight.main_grad, total, TOLERANCES["bfloat16"], f"{kernel.source}: main_grad")


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprob_may_overwrite_the_output_of_a_projection(
    kernels: KernelTable, device: Device, dtype: str, entropy_grad: bool
) -> None:
    """The projection's own gradients are right although its output was used as scratch space."""
    case = linear_logprob_case(24, 16, 50, 0.8, entropy_grad=entropy_grad)
    hidden, weight, targets = inputs_of(case, dtype, contiguous, device)

    def projected(fn: Callable[..., Any], x: Tensor, w: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        logprob, entropy = fn(torch.nn.functional.linear(*leaves), ids, 0.8, None, entropy_grad=entropy_grad)
        return gradients(leaves, (logprob.square(), entropy))

    reference = reference_kernel("vocab_parallel_logprob").fn
    expected = projected(reference, hidden.cpu().double(), weight.cpu().double(), targets.cpu())
    # the projection itself rounds: twice what a kernel alone may differ
    relative, absolute = TOLERANCES[dtype]
    for kernel in kernels.candidates("vocab_parallel_logprob", dtype=dtype):
        actual = projected(kernel.fn, hidden, weight, targets)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, (2 * relative, 2 * absolute), kernel.source)
