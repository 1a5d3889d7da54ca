"""The kernels in Triton pass the cases of the conformance suite in Triton's interpreter, without a GPU.

``TRITON_INTERPRET=1 pytest tests/backends/cuda/test_triton_kernels.py -k rms_norm`` takes a minute; the
whole file, with a program for every token of a router, takes many.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from anygauge.testing.conformance.kernel_cases import CASES, Case
from anygauge.testing.conformance.kernel_checks import LAYOUTS, check_kernel
from anygauge_cuda.kernels import MODULES, kernels
from anygauge_hooks.types import Device

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

HOST = cast(Device, SimpleNamespace(torch_device=torch.device("cpu"), get_rng_state=torch.get_rng_state))
PROCESSORS = 2


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, interpreter_loops: None, interpreter_products: None) -> None:
    """Give the host two processors."""
    from anygauge_cuda.triton import grouped, rows

    monkeypatch.setattr(rows, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(grouped, "_shared_memory", lambda device: grouped.LARGE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op in MODULES and not case.in_one_dtype], ids=str
)
def test_agrees_with_the_reference(case: Case, dtype: str, layout: str) -> None:
    in_triton = [
        kernel
        for kernel in kernels()
        if kernel.op == case.op and kernel.source.startswith("anygauge_cuda.triton.")
    ]
    assert in_triton
    for kernel in in_triton:
        check_kernel(kernel, case, dtype, LAYOUTS[layout], HOST)
