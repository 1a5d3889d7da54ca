"""The CUDA backend's device, environment and groups on real GPUs (marker ``cuda``)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge_cuda import env, host, numa, probe
from anygauge_hooks.types import HostCheck

PROGRAMS = Path(__file__).with_name("programs")
Run = Callable[..., str]

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def gpu() -> Any:
    from anygauge_cuda.device import CudaDevice

    return CudaDevice(0)


def test_the_probe_passes() -> None:
    found = probe.probe()
    assert found.ok, found
    assert f"{torch.cuda.device_count()} x " in found.reason


def test_doctor_finds_what_is_there() -> None:
    found: dict[str, HostCheck] = {check.name: check for check in host.host_checks()}
    for name in ("GPUs", "driver", "libcuda", "torch", "driver of torch", "triton"):
        assert found[name].status == "PASS", found[name]
    assert torch.version.cuda is not None
    assert found["torch"].found.endswith(f"for CUDA {torch.version.cuda}")


def test_draws_repeat_from_a_seed_and_from_a_state(gpu: Any) -> None:
    gpu.seed(1)
    first = torch.rand(1000, device=gpu.torch_device)
    state = gpu.get_rng_state()
    second = torch.rand(1000, device=gpu.torch_device)
    gpu.set_rng_state(state)
    assert torch.equal(torch.rand(1000, device=gpu.torch_device), second)
    gpu.seed(1)
    assert torch.equal(torch.rand(1000, device=gpu.torch_device), first)


def test_memory_is_counted_and_given_back(gpu: Any) -> None:
    gpu.empty_cache()
    gpu.peak_memory(reset=True)
    before = gpu.memory()
    held = torch.zeros(1 << 28, device=gpu.torch_device)
    gpu.synchronize()
    during = gpu.memory()
    assert during["allocated"] - before["allocated"] == held.nbytes
    del held
    assert gpu.peak_memory() >= before["allocated"] + (1 << 30)
    gpu.empty_cache()
    assert gpu.memory()["free"] >= during["free"] + (1 << 29)


def test_meters_move_with_the_load(gpu: Any) -> None:
    pytest.importorskip("pynvml")
    gpu.meters()
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=gpu.torch_device)
    for _ in range(500):
        torch.mm(x, x, out=torch.empty_like(x))
    gpu.synchronize()
    found = gpu.meters()
    assert 50 < found["power"] < 2000
    assert 10 < found["temperature"] < 110
    assert found["clock"] > 300
    assert all(math.isfinite(value) and value >= 0 for value in found.values())


def test_near_cores_are_cores_of_this_machine(gpu: Any) -> None:
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert numa.near_cores(uuid) <= set(range(os.cpu_count() or 1))


def test_a_bucket_is_mapped_by_a_process_that_is_no_relative(run: Run, tmp_path: Path) -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": env.ALLOCATOR[1], "ANYGAUGE_CUDA_MEMORY_HISTORY": "1000"}
    file = tmp_path / "bucket"
    with ThreadPoolExecutor(2) as pool:
        sender = pool.submit(run, "allocations.py", "share", str(file), environ=environ)
        receiver = pool.submit(run, "allocations.py", "map", str(file), environ={env.ALLOCATOR[0]: ""})
        assert receiver.result().split() == ["mapped", "True"]
        lines = sender.result().splitlines()
    assert lines[0] == "trainer True"
    assert lines[1] == "bucket False after True"
    assert lines[-1] == "snapshot True"


@pytest.mark.parametrize("kind", ["index", "uuid", "abbreviated"])
def test_a_worker_takes_the_gpu_of_its_id(kind: str) -> None:
    last = torch.cuda.device_count() - 1
    uuid = f"GPU-{torch.cuda.get_device_properties(last).uuid}"
    wanted = {"index": str(last), "uuid": uuid, "abbreviated": uuid[:12]}[kind]
    program = (
        "import os, sys, torch\n"
        "from anygauge_cuda.env import local_device\n"
        "index = local_device([sys.argv[1]], os.environ)\n"
        "print(index, torch.cuda.get_device_properties(index).uuid)\n"
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": wanted}
    command = [sys.executable, "-c", program, uuid if kind != "index" else wanted]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert f"GPU-{done.stdout.split()[1]}" == uuid


@pytest.mark.cuda(gpus=2)
def test_a_rank_that_never_comes_ends_the_wait_by_name(tmp_path: Path) -> None:
    file = str(tmp_path / "store")
    command = [sys.executable, str(PROGRAMS / "two_gpus.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    for output in outputs:
        assert "options 6.0 4" in output, output
        assert "sum 3.0" in output, output
    assert ranks[0].returncode != 0
    assert "not reached" not in outputs[0]
    assert "OpType=ALLREDUCE" in outputs[0], outputs[0][-4000:]
    assert "Timeout(ms)=6000" in outputs[0]
    assert [*tmp_path.glob("store-0.collectives-*")], [*tmp_path.iterdir()]
