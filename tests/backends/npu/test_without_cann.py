"""Commands on a host where torch-npu is installed and CANN is not: there, `import torch` itself fails.

Runs in an environment of its own: ``make test-npu-sim``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic_grpo.toml"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
MISSING = "cannot open shared object file"

pytestmark = [
    pytest.mark.npu_sim,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_npu") is None, reason="needs torch-npu: run `make test-npu-sim`"
    ),
]


def anygauge(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "anygauge", *arguments, **environ)


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: each for name, each in os.environ.items() if name not in (AUTOLOAD, "LD_LIBRARY_PATH")}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_command_that_needs_torch_says_what_to_do() -> None:
    done = anygauge("hooks", "--backend", "npu")
    assert done.returncode == 1
    assert f"its extension torch_npu does not load (libhccl.so: {MISSING}" in done.stderr
    assert f"export {AUTOLOAD}=0" in done.stderr
    assert "[AG106]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_needs_no_torch() -> None:
    done = anygauge("train", str(EXAMPLE), "--dry-run", "--no-file-check")
    assert done.returncode == 0, done.stderr
    assert "npu: CANN is missing or too old" in done.stderr


def make_inputs(out: Path, **environ: str) -> None:
    script = EXAMPLE.parent / "arithmetic/make_inputs.py"
    one_step = ("--stop-score", "0", "--check-interval", "1", "--max-steps", "1")
    done = python(str(script), "--out", str(out), *one_step, **environ)
    assert done.returncode == 0, done.stderr


def test_the_backend_that_was_asked_for_says_what_it_lacks(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    make_inputs(inputs, **{AUTOLOAD: "0"})
    keys = {
        "model.path": inputs / "model",
        "data.train": f'["{inputs / "train.jsonl"}"]',
        "eval.data": "[]",
        "run.directory": tmp_path / "runs",
        "placement.launcher": "local",
    }
    told = (part for name, value in keys.items() for part in (f"--{name}", str(value)))
    done = anygauge("train", str(EXAMPLE), "--backend", "npu", *told)
    assert done.returncode == 1
    assert not (tmp_path / "runs").exists()
    assert f"CANN is missing or too old (libascendcl.so: {MISSING}" in done.stderr
    assert "source its set_env.sh" in done.stderr


def test_doctor_tells_the_cause_from_the_consequence() -> None:
    done = anygauge("doctor")
    assert done.returncode == 1, "the cpu backend cannot run like this"
    _, _, rows = done.stdout.partition("Backends\n")
    cpu, npu = (row for row in rows.splitlines() if row.split()[1:2] in (["cpu"], ["npu"]))
    assert "its extension torch_npu does not load" in cpu
    assert "CANN is missing or too old" in npu


def test_a_cpu_worker_can_import_the_models_of_transformers() -> None:
    code = (
        "from anygauge.plugins import load_plugins\n"
        "plugins = load_plugins()\n"
        "cpu = plugins.get('register_backends', 'cpu')\n"
        "plugins.prepare_worker(cpu, 'actor', 'before_vendor_import')\n"
        "import transformers.models.qwen3.modeling_qwen3\n"
    )
    done = python("-c", code, **{AUTOLOAD: "0"})
    assert done.returncode == 0, done.stderr


def test_the_inputs_of_the_examples_are_made_whatever_the_variable_says(tmp_path: Path) -> None:
    make_inputs(tmp_path / "inputs", **{AUTOLOAD: "1"})
    assert (tmp_path / "inputs" / "model/model.safetensors").is_file()


def test_with_the_variable_the_cpu_backend_works() -> None:
    assert "PASS          cpu" in anygauge("doctor", **{AUTOLOAD: "0"}).stdout
    done = anygauge("hooks", "--backend", "cpu", **{AUTOLOAD: "0"})
    assert done.returncode == 0, done.stderr
    done = anygauge("train", str(EXAMPLE), "--dry-run", "--no-file-check", **{AUTOLOAD: "0"})
    assert done.returncode == 0, done.stderr
    assert "backend: cpu (no accelerator backend is usable (" in done.stderr
    assert "npu: CANN is missing or too old" in done.stderr
