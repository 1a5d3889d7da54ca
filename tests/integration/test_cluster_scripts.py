"""The scripts for clusters: their logic with stand-ins for Slurm, and the whole of it with real Ray nodes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from anygauge.config.validate import keys
from anygauge.testing.tiny import tiny_qwen3

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "clusters"
Start = Callable[..., subprocess.Popen[str]]
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
printf 'node-%s\\n' $(seq "$SLURM_JOB_NUM_NODES")
"""
# A signal before `exec`, or before `wait`, may be lost, so that these sleep briefly and look.
ANYGAUGE = """#!/bin/bash
trap 'echo "$1" >> "$CALLS-terminated"; exit 143' TERM # first: a test signals as soon as it sees the call
echo "$@" >> "$CALLS"
case " $* " in
  *" --print-head "*) echo 10.0.0.1:7000; exit ;;
  *" --run "*) RUN_STATUS=killed ;;
  *) until [[ $(grep -c -- "--run " "$CALLS") -ge $PARTS ]]; do sleep 0.02; done ;; # waits for its nodes
esac
while [[ $RUN_STATUS == killed ]]; do sleep 0.02; done
exit "$RUN_STATUS"
"""


def write_commands(directory: Path, **commands: str) -> None:
    directory.mkdir(exist_ok=True)
    for name, text in commands.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put stand-ins for Slurm's commands on PATH, beside those of this environment."""
    commands = tmp_path / "bin"
    write_commands(commands, srun=SRUN, scontrol=SCONTROL)
    monkeypatch.setenv("PATH", f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-[1-2]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    return commands


@pytest.fixture
def calls(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for our commands too; they write their arguments into the returned file."""
    write_commands(slurm, anygauge=ANYGAUGE, ray="#!/bin/bash\n")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PARTS", "2")
    monkeypatch.setenv("RUN_STATUS", "0")
    return tmp_path / "calls"


@pytest.fixture
def sbatch() -> Iterator[Start]:
    """Start jobs; what a failed test leaves of them is killed."""
    jobs = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = ["bash", str(SCRIPTS / "slurm.sbatch"), *arguments]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs.append(subprocess.Popen(command, **output, start_new_session=True))
        return jobs[-1]

    yield start
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def test_a_slurm_job_starts_a_head_a_worker_and_the_run(calls: Path, sbatch: Start) -> None:
    job = sbatch("c.toml", "--run.seed", "3")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    size = "c.toml --run.seed 3 --nodes 2 --devices 4"
    assert sorted(calls.read_text().splitlines()) == [
        f"launch {size} --head 10.0.0.1:7000 --run head",
        f"launch {size} --head 10.0.0.1:7000 --run worker",
        f"launch {size} --print-head",
        "train c.toml --run.seed 3 --cluster.address 10.0.0.1:7000",
    ]
    with pytest.raises(ProcessLookupError):  # nothing of the job is left
        os.killpg(job.pid, 0)


def test_a_slurm_job_ends_as_its_run_does(
    calls: Path, sbatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_STATUS", "7")
    job = sbatch("c.toml")
    job.communicate(timeout=60)
    assert job.returncode == 7


def test_a_warning_of_slurm_ends_the_run_in_order(
    calls: Path, sbatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_STATUS", "killed")
    job = sbatch("c.toml")
    deadline = time.monotonic() + 60
    while not (calls.exists() and "train" in calls.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 143, output
    assert "train" in Path(f"{calls}-terminated").read_text()


def test_a_head_that_does_not_start_ends_the_job(
    calls: Path, slurm: Path, sbatch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_commands(slurm, ray="#!/bin/bash\nexit 1\n", srun="#!/bin/bash\nexit 1\n")
    job = sbatch("c.toml")
    job.communicate(timeout=60)
    assert job.returncode == 1
    assert "train" not in calls.read_text()


def test_a_ray_job_is_the_run_on_the_cluster_that_it_is_submitted_to(calls: Path, slurm: Path) -> None:
    write_commands(slurm, ray='#!/bin/bash\necho "ray $@" >> "$CALLS"\n')
    subprocess.run([SCRIPTS / "ray_job.sh", "http://h:8265", "c.toml", "--run.seed", "3"], check=True)
    run = "anygauge train c.toml --run.seed 3 --cluster.address auto"
    assert calls.read_text() == f"ray job submit --address http://h:8265 -- {run}\n"


def test_the_kubernetes_job_runs_what_this_release_has() -> None:
    job = yaml.safe_load((SCRIPTS / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    pinned = [line.split()[0] for line in (ROOT / "requirements/cpu.txt").read_text().splitlines() if line]
    assert f"ray=={cluster['rayVersion']}" in pinned
    assert cluster["authOptions"] == {"mode": "token"}
    words = job["spec"]["entrypoint"].split()
    assert words[:5] == ["anygauge", "train", "/shared/run.toml", "--cluster.address", "auto"]
    known = {path for path, _ in keys()}
    assert {word.removeprefix("--") for word in words if word.startswith("--")} <= known
    workers = cluster["workerGroupSpecs"][0]
    devices = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(devices) * workers["replicas"] == int(words[words.index("--placement.train_workers") + 1])


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", ["slurm.sbatch", "ray_job.sh"])
def test_shellcheck_finds_nothing(name: str) -> None:
    subprocess.run(["shellcheck", SCRIPTS / name], check=True)


# -------------------------------------------------------------------------
# With real Ray nodes
# -------------------------------------------------------------------------


def write_recipe(directory: Path) -> Path:
    model = tiny_qwen3(directory / "model", init_std=0.3)
    (directory / "data.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}))
    (directory / "run.toml").write_text(
        f"""
        model = "{model}"
        [run]
        name = "run"
        directory = "{directory}"
        steps = 2
        [data]
        train = ["{directory}/data.jsonl"]
        [reward]
        function = "exact_match"
        [rollout]
        prompts_per_step = 2
        samples_per_prompt = 2
        max_new_tokens = 4
        [placement]
        train_workers = 2
        threads_per_worker = 1
        """
    )
    return directory / "run.toml"


@pytest.mark.soak
def test_a_slurm_job_trains_on_two_nodes(
    slurm: Path, sbatch: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVICES", "1")
    job = sbatch(str(write_recipe(tmp_path)))
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert "done: 2 of 2 steps" in output


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="ray[default] is not installed")
def test_a_ray_job_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret-of-a-test")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    from anygauge.runtime.ray_commands import free_port, head_command
    from anygauge_cpu.plugin import CPU

    dashboard = free_port("127.0.0.1")
    command = [word for word in head_command(CPU, 2, port=free_port("127.0.0.1")) if "dashboard" not in word]
    head = subprocess.Popen([*command, f"--dashboard-port={dashboard}", "--block"], start_new_session=True)
    try:
        address = f"http://127.0.0.1:{dashboard}"
        deadline = time.monotonic() + 60
        jobs = ["ray", "job", "list", "--address", address]
        while subprocess.run(jobs, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        job = [SCRIPTS / "ray_job.sh", address, write_recipe(tmp_path)]
        done = subprocess.run(job, capture_output=True, text=True, timeout=200, check=False)
    finally:
        head.terminate()
        head.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 2 of 2 steps" in done.stdout
