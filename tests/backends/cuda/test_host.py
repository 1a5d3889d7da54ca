"""``anygauge doctor`` on NVIDIA hosts, on directory trees made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge_cuda import host
from anygauge_cuda.host import Host
from anygauge_cuda.plugin import CUDA, report_environment
from anygauge_hooks import host as shared
from anygauge_hooks.types import HostCheck

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)  Sep\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\nGCC version: gcc 12.3.0\n"
FILES: Mapping[str, str] = {
    **{f"dev/{name}": "" for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm")},
    **{
        f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 16\n"
        for bus in (18, 19)
    },
    "proc/driver/nvidia/version": OPEN,
    "usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05": "",
    "usr/bin/nvidia-smi": "",
    "dev/infiniband/uverbs0": "",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    "sys/module/nvidia_peermem/version": "",
    "site/torch/version.py": "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n",
}
INSTALLED: Mapping[str, str | None] = {
    "torch": "2.11.0+cu130",
    "nvidia-nccl-cu13": "2.28.9",
    "nvidia-ml-py": "13.615.71",
    "triton": "3.6.0",
    "liger-kernel": "0.8.5",
    "flash-attn-4": "4.0.0",
    "transformer-engine": "2.9.0",
    "torch_memory_saver": "0.0.10",
    "sglang": "0.5.17",
    "sglang-kernel": "0.4.5",
}
Look = Callable[..., dict[str, HostCheck]]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    monkeypatch.setattr(shared.resource, "getrlimit", lambda which: (-1, -1))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=1 << 24))

    def look(
        without: str = "\0",
        files: Mapping[str, str] = FILES,
        installed: Mapping[str, str | None] = INSTALLED,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> dict[str, HostCheck]:
        for name, text in files.items():
            if without not in name:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
                if "libcuda.so." in name:
                    link = (tmp_path / name).with_name("libcuda.so.1")
                    link.unlink(missing_ok=True)
                    link.symlink_to(Path(name).name)
        if files:
            (tmp_path / "dev/shm").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(shared, "distribution", lambda name: found(name, installed, tmp_path / "site"))
        given = {"machine": "x86_64", **options}
        return {check.name: check for check in host.host_checks(Host(tmp_path, environ or {}, **given))}

    return look


def found(name: str, installed: Mapping[str, str | None], site: Path) -> Any:
    if installed.get(name) is None:
        raise PackageNotFoundError(name)
    requires = ["torch==2.11.0", "numpy"] if name == "sglang" else []
    return SimpleNamespace(
        name=name, version=installed[name], requires=requires, locate_file=lambda file: site / file
    )


def test_a_complete_host_passes(look: Look) -> None:
    found = look()
    assert {check.status for check in found.values()} == {"PASS"}
    assert found["GPUs"].found == "2 x NVIDIA H200"
    assert found["driver"].found == "580.95.05 (open kernel module)"
    assert found["libcuda"].found == "libcuda.so.580.95.05"
    assert found["torch"].found == "2.11.0+cu130 for CUDA 13.0"
    assert found["driver of torch"].found == "580.95.05 runs CUDA 13.0"
    assert found["NCCL"].found == "2.28.9"
    assert found["flash-attn"].found == "4.0.0 (flash-attn-4)"
    assert found["InfiniBand"].found == "active: mlx5_0"
    assert len(found) == 21


def test_an_empty_host_is_told_what_to_install_and_nothing_fails(look: Look) -> None:
    found = look(files={}, installed={"torch": "2.13.0+cpu"})
    assert {name for name, check in found.items() if check.status == "PASS"} == {"architecture"}
    others = [check for check in found.values() if check.status != "PASS"]
    assert {check.status for check in others} == {"NOT INSTALLED"}
    assert all(check.fix for check in others)


@pytest.mark.parametrize(
    ("name", "status", "reason", "fix", "change"),
    [
        ("architecture", "FAIL", "riscv64", "aarch64 and x86_64", {"machine": "riscv64"}),
        ("GPUs", "FAIL", "there is no /dev/nvidia0", "--gpus all", {"without": "dev/nvidia"}),
        ("GPUs", "PASS", "3: /dev/nvidia0 to /dev/nvidia10", "", {"without": "information"}),
        ("driver", "NOT INSTALLED", "no /proc", "install", {"without": "nvidia/version"}),
        ("libcuda", "FAIL", "no libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES", {"without": "libcuda"}),
        (
            "libcuda",
            "FAIL",
            "libcuda.so.580.95.05 beside the kernel module of 550.54.15",
            "reboot",
            {"files": {**FILES, "proc/driver/nvidia/version": CLOSED}},
        ),
        (
            "driver of torch",
            "FAIL",
            "550.54.15 does not run CUDA 13.0",
            "580.65.06 or newer, or install a torch for CUDA 12",
            {"files": {**FILES, "proc/driver/nvidia/version": CLOSED}},
        ),
        (
            "driver of torch",
            "UNKNOWN",
            "CUDA 19.1 is in no table",
            "",
            {"files": {**FILES, "site/torch/version.py": "cuda: Optional[str] = '19.1'\n"}},
        ),
        ("nvidia-smi", "NOT INSTALLED", "not found", "CAPABILITIES", {"without": "nvidia-smi"}),
        (
            "torch",
            "FAIL",
            "is built without CUDA",
            "requirements/cuda.txt",
            {"files": {**FILES, "site/torch/version.py": "cuda: Optional[str] = None\n"}},
        ),
        (
            "InfiniBand",
            "FAIL",
            "none of 1 ports is active",
            "ibstat",
            {"without": "mlx5_0"},
        ),
        ("InfiniBand", "FAIL", "mlx5_0 without /dev/infiniband", "--cap-add", {"without": "dev/infini"}),
        ("InfiniBand", "NOT INSTALLED", "over TCP", "--device", {"without": "infiniband"}),
        ("GPUDirect RDMA", "UNKNOWN", "dma-buf", "", {"without": "peermem"}),
        (
            "GPUDirect RDMA",
            "NOT INSTALLED",
            "not loaded",
            "modprobe nvidia-peermem",
            {"without": "peermem", "files": {**FILES, "proc/driver/nvidia/version": CLOSED}},
        ),
        ("NCCL_CUMEM_ENABLE", "UNKNOWN", "hang", "unset", {"environ": {"NCCL_CUMEM_ENABLE": "1"}}),
        (
            "environment",
            "PASS",
            "CUDA_VISIBLE_DEVICES=0,1 NCCL_NVLS_ENABLE=1",
            "",
            {"environ": {"NCCL_NVLS_ENABLE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}},
        ),
    ],
)
def test_a_host_lacks_something(
    look: Look, name: str, status: str, reason: str, fix: str, change: Mapping[str, Any]
) -> None:
    found = look(**change)[name]
    assert found.status == status
    assert reason in found.found
    assert fix in (found.fix or "")


@pytest.mark.parametrize(
    ("name", "status", "reason", "fix", "change"),
    [
        ("torch", "NOT INSTALLED", "not installed", "requirements/cuda.txt", {"torch": None}),
        ("NCCL", "NOT INSTALLED", "no wheel", "torch", {"nvidia-nccl-cu13": None}),
        ("NCCL", "PASS", "2.27.3", "", {"nvidia-nccl-cu13": None, "nvidia-nccl-cu12": "2.27.3"}),
        ("NVML", "NOT INSTALLED", "optional", "nvidia-ml-py", {"nvidia-ml-py": None}),
        ("triton", "NOT INSTALLED", "optional", "comes with torch", {"triton": None}),
        ("liger-kernel", "NOT INSTALLED", "optional", "pip install", {"liger-kernel": None}),
        ("flash-attn", "NOT INSTALLED", "optional", "pip install", {"flash-attn-4": None}),
        ("flash-attn", "PASS", "2.8.3", "", {"flash-attn": "2.8.3"}),
        ("transformer-engine", "NOT INSTALLED", "optional", "==2.11.0", {"transformer-engine": None}),
        ("torch_memory_saver", "NOT INSTALLED", "optional", "share", {"torch_memory_saver": None}),
        ("SGLang", "NOT INSTALLED", "optional", "docs/sglang.md", {"sglang": None}),
        ("SGLang", "FAIL", "wants torch==2.11.0", "docs/sglang.md", {"torch": "2.12.0+cu130"}),
        ("sglang-kernel", "FAIL", "does not start", "pip install", {"sglang-kernel": None}),
    ],
)
def test_a_package_is_missing_or_does_not_fit(
    look: Look, name: str, status: str, reason: str, fix: str, change: Mapping[str, str | None]
) -> None:
    found = look(installed={**INSTALLED, **change})[name]
    assert found.status == status
    assert reason in found.found
    assert fix in (found.fix or "")


def test_a_device_that_may_not_be_opened_is_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidia1")
    found = look()["GPUs"]
    assert (found.status, found.found) == ("FAIL", "/dev/nvidia1 may not be opened by this user")


def test_limits_of_a_container_are_named(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=16384))
    monkeypatch.setattr(shared.resource, "getrlimit", lambda which: (65536, 65536))
    found = look()
    assert (found["shared memory"].status, found["shared memory"].found) == ("FAIL", "/dev/shm has 64 MiB")
    assert "--shm-size" in (found["shared memory"].fix or "")
    assert found["locked memory"].found == "at most 64 KiB, which InfiniBand exceeds"
    assert "memlock=-1" in (found["locked memory"].fix or "")
    monkeypatch.setattr(shared.resource, "getrlimit", lambda which: (1024, 1024))
    assert look()["open files"].found == "at most 1024"


def test_the_log_of_a_run_has_the_versions(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    look()
    monkeypatch.setenv(host.ROOT, str(tmp_path))
    assert report_environment() == {"NVIDIA driver": "580.95.05", "NCCL": "2.28.9"}


def test_doctor_shows_the_host_and_imports_no_torch(tmp_path: Path, look: Look) -> None:
    look()
    program = (
        "import sys\n"
        "from anygauge_cuda.host import host_checks\n"
        "print(*(check.name for check in host_checks()))\n"
        "assert not {'torch', 'pynvml', 'triton'} & {*sys.modules}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, host.ROOT: str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "GPUs driver libcuda" in done.stdout
    assert CUDA.host_checks is host.host_checks
