"""Tests on real Ascend hardware: ``python -m pytest -m npu_hw tests/backends/npu/hardware``.

They fail where there is none, and on a simulated device: who asks for them wants an answer. None of them has
ever passed, for want of an Ascend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]

Run = Callable[..., str]


def absence(root: Path = Path("/")) -> str | None:
    """Return why there is no Ascend here, or ``None``."""
    if not any(path.name[7:].isdecimal() for path in (root / "dev").glob("davinci*")):
        return "there is no /dev/davinci0"
    if any(name.startswith("SIMULATED_") for name in os.environ):
        return "the device is a simulated one"
    return None


@pytest.fixture(scope="session", autouse=True)
def ascend() -> None:
    """Fail unless there is an Ascend."""
    reason = absence()
    if reason:
        pytest.fail(f"npu_hw tests need Ascend hardware: {reason}.", pytrace=False)


@pytest.fixture(scope="session")
def npu(ascend: None) -> Any:
    """Return the device object of the first NPU."""
    from anygauge.plugins import load_plugins, select_backend

    plugins = load_plugins()
    backend, _ = select_backend(plugins, "npu")
    plugins.prepare_worker(backend, "actor", "before_vendor_import")
    return plugins.make_device(backend, 0)


@pytest.fixture(scope="session")
def kernels(npu: Any) -> Any:
    """Return the kernel table of the backend."""
    from anygauge.kernels.table import resolve_kernels
    from anygauge.plugins import load_plugins, select_backend

    plugins = load_plugins()
    return resolve_kernels(plugins, select_backend(plugins, "npu")[0])


@pytest.fixture
def run(ascend: None, tmp_path: Path) -> Run:
    """Return a function that runs a command in the clone and returns its output, or fails with it."""

    def run(*command: str, timeout_s: float = 1700) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run
