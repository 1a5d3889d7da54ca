"""Products of experts by torch's grouped operator, which has a form for the host with the same conditions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from anygauge.testing.conformance.kernel_cases import CASES, Case
from anygauge.testing.conformance.kernel_checks import LAYOUTS, check_kernel
from anygauge_cuda import experts
from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.types import Device

HOST = cast(Device, SimpleNamespace(torch_device=torch.device("cpu"), get_rng_state=torch.get_rng_state))
KERNEL = KernelImpl(op="grouped_matmul", fn=experts.grouped_matmul, source="torch.nn.functional.grouped_mm")


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the host has the operator for bfloat16."""
    monkeypatch.setattr(experts, "_has_grouped", lambda device, dtype: dtype == torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op == "grouped_matmul" and not case.in_one_dtype], ids=str
)
def test_agrees_with_the_reference(case: Case, dtype: str, layout: str) -> None:
    check_kernel(KERNEL, case, dtype, LAYOUTS[layout], HOST)


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
