"""The real MindSpeed on a simulated NPU, beside the backend without it: plumbing, never numerics.

MindSpeed is on no index. Its package at the pinned commit is read from an archive outside the repository,
which ``MINDSPEED_ARCHIVE`` may name. triton-ascend and torchair, which need a driver and CANN, are stand-ins.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

pytestmark = pytest.mark.npu_sim

HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "train_with_provider.py"
ARCHIVE = Path(
    os.environ.get("MINDSPEED_ARCHIVE")
    or HERE.parents[3] / "shared" / "reference" / "mindspeed" / "MindSpeed-e4772499.tar.xz"
)
LINEARS = {f"mindspeed.te.pytorch.module.linear.TE{name}ParallelLinear" for name in ("Column", "Row")}
Run = Callable[..., CompletedProcess[str]]


def reported(done: CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr[-4000:]
    report: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not ARCHIVE.is_file():
        pytest.skip(f"needs MindSpeed's package: no {ARCHIVE}, and MINDSPEED_ARCHIVE names no other")
    return tmp_path_factory.mktemp("mindspeed")


@pytest.fixture(scope="module")
def plain(directory: Path, simulated: Run) -> dict[str, Any]:
    """Return what the backend gives without a provider; the others read the model that it wrote."""
    (report,) = reported(simulated(str(PROGRAM), str(directory)))
    return report


@pytest.fixture(scope="module")
def runs(directory: Path, plain: dict[str, Any], simulated: Run) -> list[dict[str, Any]]:
    """Return what two strict runs give: with this project's linears and with MindSpeed's."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    (package,) = directory.glob("*/mindspeed/megatron_adaptor.py")
    return reported(simulated(str(PROGRAM), str(directory), str(package.parents[1])))


def test_it_trains_as_the_backend_does_without_it(
    plain: dict[str, Any], runs: list[dict[str, Any]], record_property: Callable[[str, object], None]
) -> None:
    for name, run in zip(("npu", "npu, MindSpeed", "npu, MindSpeed's linears"), (plain, *runs), strict=True):
        record_property(f"simulated {name}", f"loss {run['losses']}, gradient norm {run['norms']}")
        assert run["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert run["norms"] == pytest.approx(plain["norms"], rel=1e-6)
        assert run["devices"] == ["npu:0"]
    assert plain["losses"][0] > 2 * plain["losses"][-1] > 0
    assert all(norm > 0.1 for norm in plain["norms"])


def test_its_classes_are_in_the_model(plain: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    ours, its = (run["forwards"] for run in runs)
    assert its.keys() >= LINEARS
    assert not ours.keys() & LINEARS
    for forwards in (ours, its):
        embedding = forwards["megatron.core.tensor_parallel.layers.VocabParallelEmbedding"]
        assert embedding.startswith("mindspeed."), embedding
    assert not any(module.startswith("mindspeed.") for module in plain["forwards"].values())


def test_no_attribute_that_it_replaces_is_unlisted(directory: Path, runs: list[dict[str, Any]]) -> None:
    listed = json.loads((directory / "actor-0.mindspeed.json").read_text())
    assert listed["after"] == "config"
    assert len(listed["replaced"]) > 400
    assert [each["name"] for each in listed["replaced"] if not each["expected"]] == []
