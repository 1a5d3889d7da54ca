"""Options of groups over HCCL, with a class that stands for torch-npu's. Simulated."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anygauge_npu.comm import group_options


@pytest.fixture(autouse=True)
def _no_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings: Any = ModuleType("torch_npu._C._distributed_c10d")
    bindings.ProcessGroupHCCL = SimpleNamespace(Options=lambda: SimpleNamespace(hccl_config={}))
    for name in ("torch_npu", "torch_npu._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, bindings.__name__, bindings)


@pytest.mark.parametrize(
    ("given", "config"),
    [
        (None, {"hccl_buffer_size": 32}),
        ("400", {"hccl_buffer_size": 32}),
        ("33", {"hccl_buffer_size": 32}),
        ("32", {}),
        ("16", {}),
    ],
)
def test_the_buffers_of_the_default_group_are_never_the_largest(
    given: str | None, config: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("HCCL_BUFFSIZE", given)
    assert group_options("default", 60.0).hccl_config == config
    assert group_options("other", 60.0).hccl_config == {}
