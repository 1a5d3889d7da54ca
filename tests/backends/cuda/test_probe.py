"""Probe of the CUDA backend on hosts made up here."""

from __future__ import annotations

import ctypes
import doctest
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.plugins import probe_backend
from anygauge_cuda import probe, releases
from anygauge_cuda.plugin import CUDA
from anygauge_hooks.types import Availability

Ask = Callable[..., Availability]
FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm", "proc/driver/nvidia/version")


class NvmlError(Exception):
    pass


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that makes a host up and probes it."""

    def ask(
        *,
        files: Sequence[str] = FILES,
        cuda: str | None = "13.0",
        count: int = 1,
        usable: bool = True,
        library: OSError | None = None,
        answer: int = 0,
        release: int = 13000,
        built_for: Sequence[str] = ("sm_80", "sm_90"),
        capability: tuple[int, int] = (9, 0),
        visible: str | None = None,
        mig: Sequence[int] | None = None,
    ) -> Availability:
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()

        def version(place: Any) -> int:
            place._obj.value = release
            return 0

        def load(name: str) -> Any:
            if library is not None:
                raise library
            assert name == "libcuda.so.1"
            return SimpleNamespace(cuInit=lambda flags: answer, cuDriverGetVersion=version)

        def init() -> None:
            raise RuntimeError("CUDA unknown error -\n this may be due to an environment")

        monkeypatch.setattr(probe, "_ROOT", tmp_path)
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        for name, value in {
            "device_count": lambda: count,
            "is_available": lambda: usable,
            "init": init,
            "get_arch_list": lambda: list(built_for),
            "get_device_capability": lambda index: capability,
            "get_device_name": lambda index: "NVIDIA H200",
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        if mig is not None:
            fake_nvml(monkeypatch, mig)
        return probe_backend(CUDA)

    return ask


def fake_nvml(monkeypatch: pytest.MonkeyPatch, modes: Sequence[int]) -> None:
    def mode(handle: int) -> tuple[int, int]:
        if modes[handle] < 0:
            raise NvmlError("not supported")
        return modes[handle], modes[handle]

    module: Any = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(modes),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMigMode=mode,
        __spec__=object(),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name == "pynvml" else find(name, *rest)
    )


def test_it_reports_its_gpus(ask: Ask) -> None:
    found = ask(count=2)
    assert (found.ok, found.reason) == (True, "2 x NVIDIA H200")


@pytest.mark.parametrize(
    ("host", "reason", "hint"),
    [
        ({"cuda": None}, "is built without CUDA", "requirements/cuda.txt"),
        ({"files": ()}, "no NVIDIA driver is loaded", "Install the driver"),
        ({"files": FILES[3:]}, "the driver is loaded, and there is no /dev/nvidia0", "--gpus all"),
        ({"library": OSError("libcuda.so.1: cannot open")}, "does not load (libcuda.so.1", "--gpus all"),
        (
            {"release": 12040},
            "the driver runs CUDA 12.4, and torch",
            "580.65.06 or newer, or install a torch",
        ),
        ({"answer": 802}, "wait for their NVSwitches (cuInit: 802)", "nvidia-fabricmanager"),
        ({"answer": 803}, "of another release than its kernel module", "reboot"),
        ({"answer": 804}, "compatibility package", "LD_LIBRARY_PATH"),
        ({"answer": 101, "visible": "7"}, "asked for twice, or does not exist", "unset CUDA_VISIBLE_DEVICES"),
        ({"answer": 999}, "does not know (cuInit: 999)", "dmesg"),
        ({"count": 0, "answer": 100}, "the NVIDIA driver reports no GPU", "nvidia-smi"),
        ({"count": 0, "visible": ""}, "CUDA_VISIBLE_DEVICES='' hides every GPU", "unset CUDA_VISIBLE"),
        ({"count": 0, "visible": "-1"}, "CUDA_VISIBLE_DEVICES='-1' hides every GPU", "unset CUDA_VISIBLE"),
        ({"count": 0, "visible": "GPU-1"}, "'GPU-1' names no GPU of this host", "unset CUDA_VISIBLE"),
        ({"count": 0, "mig": [-1, 0, 1]}, "GPU 2 is in MIG mode", "nvidia-smi mig -i 2 -cgi 0 -C"),
        ({"count": 0, "mig": [0, -1]}, "the NVIDIA driver reports no GPU", "nvidia-smi"),
        ({"usable": False}, "cannot use the GPU (CUDA unknown error - this may be", "Xid"),
        ({"usable": False, "visible": "0"}, "cannot use the GPU (CUDA unknown error", "Xid"),
        (
            {"capability": (12, 0)},
            "no code for NVIDIA H200 (compute capability 12.0), only sm_80, sm_90",
            "built for it",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_it_says_what_is_wrong_and_what_to_do(
    ask: Ask, host: Mapping[str, Any], reason: str, hint: str
) -> None:
    found = ask(**host)
    assert not found.ok
    assert reason in found.reason
    assert hint in str(found.hint)


def test_a_torch_for_amd_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "is built for AMD GPUs" in ask(cuda=None).reason


def test_a_file_that_may_not_be_opened_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidiactl")
    found = ask()
    assert found.reason == "this user may not open /dev/nvidiactl"
    assert "chmod 0666" in str(found.hint)


def test_one_gpu_that_may_be_opened_is_enough(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = {"nvidia1"}
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name not in closed)
    files = (*FILES, "dev/nvidia1")
    assert ask(files=files).ok
    closed.add("nvidia0")
    assert ask(files=files).reason == "this user may not open /dev/nvidia0, /dev/nvidia1"


def test_linux_inside_windows_has_another_driver(ask: Ask) -> None:
    assert ask(files=("dev/dxg",)).ok


def test_a_driver_that_is_newer_than_torch_runs_it(ask: Ask) -> None:
    assert ask(release=13020, cuda="12.8").ok


def test_the_examples_of_the_table_are_true() -> None:
    assert doctest.testmod(releases).failed == 0
