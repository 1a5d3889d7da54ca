"""Calls of Liger's Ascend kernels have the arguments of the wheel; the kernels themselves do not run here."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.kernels import reference
from anygauge_hooks.errors import KernelInputError
from anygauge_npu import liger
from anygauge_npu.kernels import npu_kernels

CONTRACT = Path(__file__).parents[3] / "backends/npu/contract/liger_kernel-0.8.5.json"
MEANING: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, weight, eps, *_: reference.rms_norm(x, weight, eps),
    "layer_norm": reference.layer_norm,
    "swiglu": lambda gate, up, *_: torch.nn.functional.silu(gate) * up,
}


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put modules in the place of Liger's, which take what the wheel's take; return what they got."""
    got: dict[str, Any] = {}
    for module, signature in json.loads(CONTRACT.read_text()).items():
        stand_in = ModuleType(f"{liger.PACKAGE}.{module}")
        function = type("Function", (), {"apply": staticmethod(taking(module, signature, got))})
        setattr(stand_in, liger.MODULES[module], function)
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    parts = liger.PACKAGE.split(".")
    for end in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    return got


def taking(module: str, signature: str, got: dict[str, Any]) -> Callable[..., Tensor]:
    """Return a function with the arguments of a contract, which keeps what it was given."""
    scope: dict[str, Any] = {}
    exec(f"def forward{signature}: pass", scope)  # the text is in this repository
    like = inspect.signature(scope["forward"])

    def apply(*args: Any) -> Tensor:
        given = like.bind(*args)
        given.apply_defaults()
        got[module] = given.arguments
        return MEANING[module](*given.args)

    return apply


def test_every_call_binds_and_means_the_reference(bound: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(8), torch.randn(8)
    for op, arguments in {
        "rms_norm": (x, weight, 1e-6),
        "layer_norm": (x, weight, bias, 1e-6),
        "swiglu": (x,),
    }.items():
        found = getattr(liger, op)(*arguments)
        torch.testing.assert_close(found, getattr(reference, op)(*arguments))
    assert bound["rms_norm"]["casting_mode"] == "gemma"
    assert bound["rms_norm"]["in_place"] is False
    assert bound["rms_norm"]["offset"] == 0


def test_nothing_is_called_for_no_numbers(bound: dict[str, Any]) -> None:
    empty, weight = torch.empty(0, 8), torch.ones(8)
    assert liger.rms_norm(empty, weight, 1e-6).shape == (0, 8)
    assert liger.layer_norm(empty, weight, weight, 1e-6).shape == (0, 8)
    assert liger.swiglu(empty).shape == (0, 4)
    assert bound == {}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: liger.rms_norm(torch.ones(2, 8).double(), torch.ones(8), 1e-6), "x in float64"),
        (lambda: liger.rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6), "weight of shape"),
        (lambda: liger.layer_norm(torch.ones(2, 8), torch.ones(8), torch.ones(4), 1e-6), "bias of shape"),
        (lambda: liger.swiglu(torch.ones(2, 7)), "gate_up of shape"),
    ],
)
def test_a_wrong_call_has_our_error(call: Callable[[], Tensor], text: str) -> None:
    with pytest.raises(KernelInputError, match=text):
        call()


def test_they_are_second_to_torch_npu_and_need_triton() -> None:
    mine = [kernel for kernel in npu_kernels() if kernel.source.startswith(liger.PACKAGE)]
    assert {kernel.op for kernel in mine} == set(liger.MODULES)
    for kernel in mine:
        first = max((k for k in npu_kernels() if k.op == kernel.op), key=lambda k: k.priority)
        assert not first.source.startswith(liger.PACKAGE)
        assert {"triton", "liger_kernel"} <= set(kernel.requires)
