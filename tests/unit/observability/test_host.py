"""What a cgroup leaves of a host."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from anygauge.observability.host import read_cpus, read_memory


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
    assert (memory.total, memory.available, memory.reason) == (1_000_000, 600_000, "cgroup limit")
