"""Five steps of the demo on two simulated NPUs over HCCL: the losses of the same run on the host.

One run replays the host's rollouts in local workers; the other generates on the NPUs that Ray gave out. Both
take the host versions of the NPU's kernels, whose sums have another order: the losses agree to 1e-5.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.npu_sim, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
INPUTS = ROOT / "examples" / "arithmetic" / "make_inputs.py"
DEMO = ROOT / "examples" / "arithmetic_grpo.toml"
STEPS = 5
SIMULATED = "SIMULATED: 2 x Ascend910B3, no hardware, no CANN"
SAME = (
    *("--run.steps", str(STEPS), "--placement.train_workers", "2"),
    *("--train.micro_batch_tokens", "8192", "--train.dtype", "float32", "--eval.data", "[]"),
)
"""Arguments that differ from the demo's, the same on each backend."""


class Demo:
    """Runs of the demo in one directory."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.directory, self._environ = directory, environ
        self.printed: dict[str, str] = {}
        self._python(str(INPUTS), "--out", "runs/arithmetic-inputs", "--stop-score", "0.03")

    def train(self, backend: str, name: str, *arguments: str, **environ: str) -> list[dict[str, Any]]:
        """Return the metrics of each training step."""
        given = ("--backend", backend, "--run.name", name, *SAME, *arguments)
        self.printed[name] = self._python("-m", "anygauge", "train", str(DEMO), *given, **environ)
        rows = map(json.loads, (self.directory / "runs" / name / "metrics.jsonl").read_text().splitlines())
        return [row for row in rows if "train/loss" in row]

    def _python(self, *arguments: str, **environ: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.directory,
            env={**self._environ, **environ},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, two_devices: Mapping[str, str]) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo"), two_devices)


@pytest.fixture(scope="module")
def on_cpu(demo: Demo) -> list[dict[str, Any]]:
    """Return what the host's run gives, whose rollouts are kept."""
    found = demo.train("cpu", "cpu", "--debug.dump_rollouts", "true")
    assert len(found) == STEPS
    assert all(abs(row["train/loss"]) > 1e-5 for row in found), "a loss of 0 would equal any other"
    return found


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["train/step"] for row in found] == [row["train/step"] for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row["rollout/reward"] == wanted["rollout/reward"]
        for name in ("train/loss", "train/log_probs", "train/entropy_loss"):
            assert row[name] == pytest.approx(wanted[name], rel=0, abs=1e-5), name
        assert row["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def replayed(demo: Demo, on_cpu: object) -> list[dict[str, Any]]:
    """Return what two NPUs give for the rollouts of the host."""
    replay = ("--debug.mode", "train_only", "--debug.replay_rollouts", "runs/cpu/dumps")
    return demo.train("npu", "replayed", *replay)


def test_replayed_rollouts_give_the_losses_of_the_host(
    demo: Demo, on_cpu: list[dict[str, Any]], replayed: list[dict[str, Any]]
) -> None:
    assert_close(replayed, on_cpu)
    capabilities = json.loads((demo.directory / "runs/replayed/capabilities.json").read_text())
    assert capabilities["backend"] == "npu"
    served = {row["op"]: row["source"] for row in capabilities["kernels"] if not row["is_reference"]}
    assert served["varlen_attention"] == "torch_npu.npu_fusion_attention"
    assert served["rms_norm"] == "torch_npu.npu_rms_norm"
    said = json.loads((demo.directory / "runs/replayed/environment.json").read_text())
    assert said["npu"] == SIMULATED


def test_what_a_run_writes_says_that_it_is_simulated(demo: Demo, replayed: object) -> None:
    """And what the host's run writes does not."""
    for name, backend in (("replayed", f"npu ({SIMULATED})"), ("cpu", "cpu")):
        run = demo.directory / "runs" / name
        report = re.sub(r"<[^>]+>", " ", (run / "report.html").read_text())
        assert re.search(rf"\bbackend\s+{re.escape(backend)}\s", report)
        assert f", backend {backend}, pid" in (run / "logs/driver.log").read_text().splitlines()[0]
        for rank in range(2):
            first = (run / f"logs/actor-{rank}.log").read_text().partition("\n")[0]
            assert (SIMULATED in first) == (name == "replayed"), first
    assert f"run replayed: {STEPS} steps on backend npu ({SIMULATED})\n" in demo.printed["replayed"]


def test_rollouts_of_npus_that_ray_gave_out_are_those_of_the_host(
    demo: Demo, on_cpu: list[dict[str, Any]]
) -> None:
    """Ray finds no simulated device, so its count is written; ids and visible devices are its own work.

    After the first update weights differ in their last bits, and a draw may fall to another token.
    """
    found = demo.train("npu", "ray", "--placement.launcher", "ray", RAY_OVERRIDE_RESOURCES='{"NPU": 2}')
    assert_close(found[:1], on_cpu[:1])
    assert len(found) == STEPS
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in found) < 1e-4
