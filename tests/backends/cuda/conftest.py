"""Tests that need a GPU are marked ``cuda``: skipped without one, failed where CUDA was asked for.

``python -m pytest -m cuda --anygauge-backend cuda tests/backends/cuda`` asks for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("programs")

Run = Callable[..., str]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compare the GPUs that a test needs, ``cuda(gpus=2)``, with those that there are."""
    marker = item.get_closest_marker("cuda")
    if marker is None:
        return
    import torch

    needed, there = marker.kwargs.get("gpus", 1), torch.cuda.device_count()
    if there >= needed:
        return
    reason = f"needs {needed} GPUs that torch can use; it sees {there}"
    if item.config.getoption("anygauge_backend") == "cuda":
        pytest.fail(f"--anygauge-backend cuda was asked for, and this test {reason}.", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def interpreter_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Triton's interpreter loops up to a number that is an argument."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # triton 3.6 makes an int of an array of one, which numpy no longer does
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture
def interpreter_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Triton's interpreter products of bfloat16: it multiplies their bits, and rounds toward zero."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = data.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def wide(x: Any) -> Any:
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data

    def dot(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        product = np.matmul(wide(a), wide(b), dtype=total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def run() -> Run:
    """Return a function that runs one of ``programs/`` and returns its output, or fails with it."""

    def run(
        program: str, *arguments: str, environ: Mapping[str, str] | None = None, succeeds: bool = True
    ) -> str:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / program), *arguments],
            env={**os.environ, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        output = done.stdout + done.stderr
        assert (done.returncode == 0) is succeeds, output[-6000:]
        return output

    return run
