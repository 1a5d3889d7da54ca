"""The NPU's kernels against the real torch-npu on a simulated device: what they call, and what that reaches.

They show shapes, dtypes, gradients and names of kernels, and never what a kernel computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from contract import read

pytestmark = pytest.mark.npu_sim

Run = Callable[..., CompletedProcess[str]]
PROGRAMS = Path(__file__).parent / "programs"
REACHED = Path(__file__).parent / "data" / "kernels_reached.json"
"""Made by ``python backends/npu/simulation --record FILE -- python
tests/backends/npu/programs/kernel_calls.py record tests/backends/npu/data/kernels_reached.json``."""

UNDECLARED = {
    "print_npugraph_tensor",
    "save_npugraph_tensor",
    "save_npugraph_tensor.tensor_list",
    "set_op_timeout_ms",
    "super_kernel_scope_begin",
    "super_kernel_scope_end",
}
"""Operators of torch-npu whose schema is no text of its library. None of them is ours."""


def written(done: CompletedProcess[str], out: Path) -> Any:
    assert done.returncode == 0, done.stderr
    assert "SIMULATED" in done.stderr
    return json.loads(out.read_text())


def calls(simulated: Run, folder: Path, mode: str, *options: str) -> Any:
    out = folder / f"{mode}.json"
    return written(simulated(str(PROGRAMS / "kernel_calls.py"), mode, str(out), options=list(options)), out)


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="torch 2.10 cannot split a fake tensor without elements, which sequences of no tokens are",
)
def test_every_kernel_has_the_shapes_of_its_reference_forward_and_backward(
    simulated: Run, tmp_path: Path
) -> None:
    problems = calls(simulated, tmp_path, "fake")
    assert len(problems) > 40
    assert {case: lines for case, lines in problems.items() if lines} == {}


def test_every_kernel_reaches_the_kernels_of_cann_as_written(simulated: Run, tmp_path: Path) -> None:
    """A CPU fallback is an error here, and a new kernel is a line of the file that differs."""
    reached = calls(simulated, tmp_path, "record", "--record", str(tmp_path / "kernels"))
    expected = json.loads(REACHED.read_text())
    if torch.__version__.startswith("2.10."):
        expected = json.loads(REACHED.read_text().replace('"aclnnTopkV2"', '"aclnnTopk"'))
    assert reached.keys() == expected.keys()
    for case, wanted in expected.items():
        assert reached[case] == wanted, case


def test_a_wrong_call_reaches_no_kernel(simulated: Run, tmp_path: Path) -> None:
    reached = calls(simulated, tmp_path, "refuse", "--record", str(tmp_path / "kernels"))
    assert len(reached) > 60
    assert {name: kernels for name, kernels in reached.items() if kernels} == {}


@pytest.fixture(scope="module")
def registered(simulated: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("registered") / "registered.json"
    return written(simulated(str(PROGRAMS / "registered.py"), str(out)), out)


def test_the_contract_is_that_of_the_installed_wheel(registered: Any) -> None:
    kept = read.contracts()[registered["version"]]
    for part in ("operators", "functions"):
        assert read.compare(kept[part], registered["contract"][part]) == []
        assert kept[part] == registered["contract"][part]


def test_schemas_read_from_the_library_are_the_registered_ones(registered: Any) -> None:
    """So a version that cannot be imported here can be read."""
    schemas, texts = registered["registered"], registered["read"]
    assert len(schemas) > 400
    assert schemas.keys() - texts.keys() == UNDECLARED
    assert {name: schemas[name] for name in schemas.keys() & texts.keys()} == {
        name: texts[name] for name in schemas.keys() & texts.keys()
    }


def test_signatures_read_from_the_sources_are_those_of_the_functions(registered: Any) -> None:
    assert registered["arguments"] == registered["read_arguments"]
