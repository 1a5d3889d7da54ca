"""Programs on simulated NPUs: plumbing and contracts, never an Ascend's numerics.

They need an environment of their own: ``make test-npu-sim``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SIMULATION = ROOT / "backends" / "npu" / "simulation"
SOURCES = ("core", "hooks", "models", "backends/cpu", "backends/npu")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def python_path() -> str:
    """Return where this checkout's packages are."""
    return os.pathsep.join(str(ROOT / source) for source in SOURCES)


def run(*command: str, limit_s: float = 200, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh process: the loader reads its search path once."""
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


@pytest.fixture(scope="session")
def simulated() -> Run:
    """Return a function that runs Python with its arguments on simulated NPUs.

    ``simulated("program.py", "argument", options=["--devices", "2"], NAME="variable")``
    """
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("needs torch-npu: run `make test-npu-sim`")

    def simulate(
        *arguments: str, options: Sequence[str] = (), limit_s: float = 200, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, str(SIMULATION), *options, "--", sys.executable, *arguments]
        return run(*launcher, limit_s=limit_s, **environ)

    return simulate


@pytest.fixture(scope="session")
def two_devices() -> Iterator[Mapping[str, str]]:
    """Return the environment of processes that share two simulated NPUs, which stay for the session."""
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("needs torch-npu: run `make test-npu-sim`")
    show = "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"
    command = [sys.executable, str(SIMULATION), "--devices", "2", "--", sys.executable, "-c", show]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        yield json.loads(launcher.stdout.readline())
        launcher.stdin.close()


@pytest.fixture(scope="session")
def on_host() -> Run:
    """Return a function that runs Python with its arguments without torch-npu, on the same wheels."""

    def execute(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, *arguments, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **environ)

    return execute
