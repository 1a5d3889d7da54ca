"""Products of experts by torch's grouped operator, which has a form for the host with the same conditions."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch

import anygauge_cuda.triton
from anygauge.testing.conformance.kernel_cases import CASES, Case
from anygauge.testing.conformance.kernel_checks import LAYOUTS, check_kernel
from anygauge_cuda import experts
from anygauge_cuda.kernels import kernels
from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.types import Device

HOST = cast(Device, SimpleNamespace(torch_device=torch.device("cpu"), get_rng_state=torch.get_rng_state))
KERNEL = KernelImpl(
    op="grouped_matmul",
    fn=experts.grouped_matmul,
    source="torch.nn.functional.grouped_mm",
    dtypes=("bfloat16",),
)


def is_of_torch(case: Case) -> bool:
    """Return whether torch's operator takes a case, and not our own kernel, which needs Triton."""
    if case.op != "grouped_matmul" or case.in_one_dtype:
        return False
    x, weight, _ = case.tensors()
    return len(x) > 0 and not any(size % 8 for size in weight.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [case for case in CASES if is_of_torch(case)], ids=str)
def test_agrees_with_the_reference(case: Case, layout: str) -> None:
    check_kernel(KERNEL, case, "bfloat16", LAYOUTS[layout], HOST)


@pytest.mark.parametrize(("tokens", "inner", "outer"), [(5, 7, 8), (5, 8, 7), (0, 8, 8)])
def test_what_the_operator_does_not_take_is_ours(
    monkeypatch: pytest.MonkeyPatch, tokens: int, inner: int, outer: int
) -> None:
    ours = ModuleType("anygauge_cuda.triton.grouped")
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    monkeypatch.setattr(anygauge_cuda.triton, "grouped", ours, raising=False)
    monkeypatch.setattr(ours, "grouped_matmul", lambda *given: given, raising=False)
    given = torch.ones(tokens, inner), torch.ones(2, outer, inner), torch.tensor([tokens, 0])
    assert experts.grouped_matmul(*given) is not None
    assert all(one is other for one, other in zip(experts.grouped_matmul(*given), given, strict=True))


@pytest.mark.parametrize(("capability", "is_for_it"), [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_the_operator_is_used_on_hopper(
    capability: tuple[int, int], is_for_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    sources = [kernel.source for kernel in kernels() if kernel.op == "grouped_matmul"]
    assert (KERNEL.source in sources) is is_for_it
    assert "anygauge_cuda.triton.grouped.grouped_matmul" in sources


def test_the_operator_is_given_what_begins_anywhere() -> None:
    """As weights do that lie in one buffer with others."""
    buffer = torch.randn(3 + 2 * 8 * 16, dtype=torch.bfloat16)
    weight = buffer[3:].view(2, 8, 16).requires_grad_()
    x, counts = torch.randn(5, 16, dtype=torch.bfloat16), torch.tensor([2, 3])
    y = experts.grouped_matmul(x, weight, counts)
    parts = [part @ expert.T for part, expert in zip(x.split([2, 3]), weight, strict=True)]
    expected = torch.cat(parts)
    torch.testing.assert_close(y, expected)
    grads = [torch.autograd.grad(out.sum(), weight)[0] for out in (y, expected)]
    torch.testing.assert_close(*grads)


def test_counts_in_bfloat16_are_not_looked_at() -> None:
    counts = torch.tensor([2, 3])
    counts.tolist = lambda: pytest.fail("the host waits")  # type: ignore[method-assign,assignment]
    x, weight = torch.randn(5, 16, dtype=torch.bfloat16), torch.randn(2, 8, 16, dtype=torch.bfloat16)
    assert experts.grouped_matmul(x, weight, counts).shape == (5, 8)
