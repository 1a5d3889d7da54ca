"""Programs on simulated NPUs: plumbing and contracts, never an Ascend's numerics.

They need an environment of their own: ``make test-npu-sim``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SIMULATION = ROOT / "backends" / "npu" / "simulation"
SOURCES = ("core", "hooks", "models", "backends/cpu", "backends/npu", "tests/support")

PARALLEL = runpy.run_path(str(ROOT / "tests" / "distributed" / "conftest.py"))
RANKS, VOCAB = 2, 63
CASES_PER_START = {"cpu": 6, "npu": 40}
"""Cases per start of all simulated devices, since they take long to start. Gloo has a thread for each group,
which wakes a hundred times a second also when nobody calls."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Train = Callable[..., list[Any]]


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
def crews(two_devices: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    """Return two ranks on the host and two on simulated NPUs; they take the cases of tests/distributed."""
    assert two_devices["TORCH_NPU_FALLBACK_CPU_DISABLE"] == "1", "an operator without a kernel is an error"
    Crew = PARALLEL["Crew"]
    with tempfile.TemporaryDirectory() as host, tempfile.TemporaryDirectory() as npu:
        found = {
            "cpu": Crew(Path(host), size=RANKS, cases_per_start=CASES_PER_START["cpu"]),
            "npu": Crew(
                Path(npu), "npu", size=RANKS, cases_per_start=CASES_PER_START["npu"], environ=two_devices
            ),
        }
        yield found
        for crew in found.values():
            crew.close()
            crew.cool()


@pytest.fixture(scope="session")
def train(crews: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that runs a case with a tiny model, by its name among those of the parallel tests.

    ``train("npu", "tied", action="train", parallel={"tensor": 2})``
    """
    models = runpy.run_path(str(ROOT / "tests/distributed/test_parallel_modes.py"))["MODELS"]
    made: dict[str, Path] = {}

    def run(backend: str, name: str, **case: Any) -> list[Any]:
        if name not in made:
            family, changes = models[name]
            made[name] = tmp_path_factory.mktemp(name)
            shape = {"vocab_size": VOCAB, "num_hidden_layers": 4, **changes}
            with pytest.MonkeyPatch.context() as patch:  # transformers imports torch-npu wherever it is
                patch.setitem(sys.modules, "torch_npu", None)  # type: ignore[arg-type]
                PARALLEL["write_model"](made[name], family, shape, 0)
        case = {"world": RANKS, "action": "train", "model": str(made[name]), "vocab": VOCAB, **case}
        found: list[Any] = crews[backend].run(**case)
        for rank, result in enumerate(found):
            assert not hasattr(result, "text"), f"rank {rank}: {getattr(result, 'text', '')}"
        return found

    return run


@pytest.fixture(scope="session")
def on_host() -> Run:
    """Return a function that runs Python with its arguments without torch-npu, on the same wheels."""

    def execute(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, *arguments, TORCH_DEVICE_BACKEND_AUTOLOAD="0", **environ)

    return execute
