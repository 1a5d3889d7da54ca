"""Host resources within a cgroup's limits."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import psutil
import pytest

from anygauge.kernels.loss_budget import LossBudget
from anygauge_cpu.device import CpuDevice
from anygauge_hooks.resources import Memory, read_cpus, read_memory, read_oom_kills


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_without_limits_the_host_counts(tmp_path: Path) -> None:
    assert read_cpus(tmp_path).usable == len(os.sched_getaffinity(0))
    assert read_memory(tmp_path).total == psutil.virtual_memory().total
    assert read_memory(tmp_path).reason == ""
    unlimited = write(tmp_path, cpu_DOT_max="max 100000\n", memory_DOT_max="max\n")
    assert read_cpus(unlimited).usable == len(os.sched_getaffinity(0))
    assert read_memory(unlimited).reason == ""


@pytest.mark.parametrize(
    "files",
    [
        {"cpu_DOT_max": "50000 100000\n"},
        {"cpu__cpu_DOT_cfs_quota_us": "50000\n", "cpu__cpu_DOT_cfs_period_us": "100000\n"},
    ],
    ids=["v2", "v1"],
)
def test_a_quota_limits_the_processors(tmp_path: Path, files: dict[str, str]) -> None:
    cpus = read_cpus(write(tmp_path, **files))
    assert (cpus.usable, cpus.reason) == (0.5, "cgroup quota")


def test_a_v1_cgroup_without_quota_says_minus_one(tmp_path: Path) -> None:
    write(tmp_path, cpu__cpu_DOT_cfs_quota_us="-1\n", cpu__cpu_DOT_cfs_period_us="100000\n")
    assert read_cpus(tmp_path).reason != "cgroup quota"


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory_DOT_max", "memory_DOT_current"),
        ("memory__memory_DOT_limit_in_bytes", "memory__memory_DOT_usage_in_bytes"),
    ],
    ids=["v2", "v1"],
)
def test_a_limit_limits_the_memory(tmp_path: Path, limit: str, used: str) -> None:
    memory = read_memory(write(tmp_path, **{limit: "1000000\n", used: "400000\n"}))
    assert memory == Memory(total=1_000_000, available=600_000, used=400_000, reason="cgroup limit")


@pytest.mark.parametrize(
    ("membership", "folder", "limit", "used", "cache"),
    [
        ("0::/job/step/task\n", "", "memory.max", "memory.current", "inactive_file"),
        (
            "9:cpuset:/\n4:cpuacct,memory:/job/step/task\n0::/\n",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "inactive_file 7\ntotal_inactive_file",
        ),
    ],
    ids=["v2", "v1"],
)
def test_the_least_limit_of_the_processs_cgroups_counts(
    tmp_path: Path, membership: str, folder: str, limit: str, used: str, cache: str
) -> None:
    (tmp_path / "membership").write_text(membership)
    job = tmp_path / folder / "job"
    (job / "step" / "task").mkdir(parents=True)
    (job / limit).write_text("1000000\n")
    (job / used).write_text("500000\n")
    (job / "memory.stat").write_text(f"anon 3\n{cache} 100000\nworkingset 1\n")
    (job / "step" / limit).write_text("max\n" if limit == "memory.max" else "9223372036854771712\n")
    (job / "step" / "task" / limit).write_text("2000000\n")
    memory = read_memory(tmp_path, tmp_path / "membership")
    assert memory == Memory(total=1_000_000, available=600_000, used=400_000, reason="cgroup limit")


@pytest.mark.parametrize(
    ("membership", "file"),
    [("0::/job\n", "job/memory.events"), ("4:memory:/job\n", "memory/job/memory.oom_control")],
    ids=["v2", "v1"],
)
def test_processes_that_the_kernel_killed_are_counted(tmp_path: Path, membership: str, file: str) -> None:
    (tmp_path / "membership").write_text(membership)
    assert read_oom_kills(tmp_path, tmp_path / "membership") == 0
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("oom 5\nunder_oom 0\noom_kill 3\noom_group_kill 1\n")
    assert read_oom_kills(tmp_path, tmp_path / "membership") == 3


def test_a_tenth_of_what_a_container_leaves_is_for_the_loss_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = write(tmp_path, memory_DOT_max="1000000\n", memory_DOT_current="400000\n")
    monkeypatch.setattr("anygauge_cpu.device.read_memory", partial(read_memory, limits))
    host = CpuDevice()
    assert (host.memory()["free"], host.memory()["total"]) == (600_000, 1_000_000)
    assert LossBudget(None, host)() == 60_000
