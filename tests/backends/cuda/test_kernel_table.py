"""What the CUDA backend declares, on a host with neither a GPU nor Triton."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

import pytest

from anygauge.kernels.table import resolve_kernels
from anygauge.plugins import Plugins, load_plugins
from anygauge_cuda.kernels import MODULES
from anygauge_cuda.plugin import CUDA


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(only=("cuda",))


class StandIn(ModuleType):
    """A module that has whatever is asked of it, and whose decorators leave a function as it is."""

    def __getattr__(self, name: str) -> object:
        if name == "__path__":
            return []
        return (lambda fn: fn) if name == "jit" else MagicMock(name=f"{self.__name__}.{name}")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for Triton, and forget what was imported with it."""
    for name in ("triton", "triton.language"):
        module = StandIn(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    before = set(sys.modules)
    for name in [n for n in before if n.startswith("anygauge_cuda.triton")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n.startswith("anygauge_cuda.triton")]:
        del sys.modules[name]


@pytest.mark.usefixtures("pretended")
def test_every_kernel_in_triton_has_the_signature_of_its_op(plugins: Plugins) -> None:
    table = resolve_kernels(plugins, CUDA)
    sources = {row.op: row.source for row in table.rows() if row.source.startswith("anygauge_cuda.triton.")}
    assert {op: f"anygauge_cuda.triton.{module}.{op}" for op, module in MODULES.items()} == {
        op: source for op, source in sources.items() if op in MODULES
    }


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is here")
def test_without_triton_its_kernels_are_left_out_and_say_why(plugins: Plugins) -> None:
    left_out = {kernel.op: kernel.missing for kernel in resolve_kernels(plugins, CUDA).left_out}
    assert {op: ("triton",) for op in MODULES}.items() <= left_out.items()
