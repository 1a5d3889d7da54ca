"""Whether this host can run the CUDA backend, and why not."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge_cuda.env import VISIBLE_DEVICES
from anygauge_cuda.releases import DRIVER_OF_CUDA, INSTALL, numbers, runs_on
from anygauge_hooks.types import Availability

__all__ = ["locked_files", "probe"]

_ROOT = Path("/")
_DRIVER = "proc/driver/nvidia/version"
_WINDOWS = "dev/dxg"
"""How a driver of the Windows host shows itself inside its Linux."""
_LIBRARY = "libcuda.so.1"
_CONTAINER = (
    "start the container with access to the GPUs: docker run --gpus all, or a device plugin's resource"
)
CODES: Mapping[int, tuple[str, str]] = {
    101: (
        "a GPU is asked for twice, or does not exist",
        f"unset {VISIBLE_DEVICES}, or name a GPU of `nvidia-smi -L`",
    ),
    802: (
        "the GPUs wait for their NVSwitches",
        "on the host: systemctl start nvidia-fabricmanager, of the driver's own release",
    ),
    803: (
        "the driver's library is of another release than its kernel module",
        "reboot the host after an update of the driver; restart a container",
    ),
    804: (
        "the driver's library is a compatibility package that this GPU does not take",
        "take /usr/local/cuda/compat out of LD_LIBRARY_PATH, or update the driver on the host",
    ),
    999: ("the driver fails for a reason that it does not know", "look into dmesg for NVRM and Xid"),
}
"""Causes and actions for the error codes of ``cuInit``, other than success and no device."""


def probe() -> Availability:
    """Return whether torch was built for CUDA, a driver runs it, and it finds a GPU that it was built for.

    What the files of the host tell is told first: CUDA's own errors name no permission and no container.
    """
    if importlib.util.find_spec("torch") is None:
        return _no("torch is not installed", INSTALL)
    import torch

    if torch.version.cuda is None:
        built = "for AMD GPUs" if getattr(torch.version, "hip", None) else "without CUDA"
        return _no(f"torch {torch.__version__} is built {built}", INSTALL)
    return _no_driver(_ROOT) or _no_cuda(torch) or _no_device(torch) or _devices(torch)


def locked_files(root: Path) -> list[str]:
    """Return the device files that this user may not open, as paths."""
    names = ["nvidiactl", "nvidia-uvm", *(path.name for path in (root / "dev").glob("nvidia[0-9]*"))]
    present = [name for name in names if (root / "dev" / name).exists()]
    return [
        f"/dev/{name}" for name in sorted(present) if not os.access(root / "dev" / name, os.R_OK | os.W_OK)
    ]


def _no(reason: str, hint: str) -> Availability:
    return Availability(ok=False, reason=reason, hint=hint)


# -------------------------------------------------------------------------
# The driver
# -------------------------------------------------------------------------


def _no_driver(root: Path) -> Availability | None:
    """Tell a host without a driver from a container without its files, and from a user without permission."""
    if (root / _WINDOWS).exists():
        return None
    if not (root / _DRIVER).exists():
        return _no("no NVIDIA driver is loaded", f"Install the driver and run nvidia-smi; or {_CONTAINER}.")
    gpus = {f"/dev/{path.name}" for path in (root / "dev").glob("nvidia[0-9]*")}
    if not gpus:
        return _no("the driver is loaded, and there is no /dev/nvidia0", f"In a container: {_CONTAINER}.")
    locked = locked_files(root)
    if gpus.difference(locked):  # a host may give each user some: what these are worth the driver says
        locked = [file for file in locked if file not in gpus]
    if locked:
        hint = f"ls -l {locked[0]} shows whose it is: join that group, or chmod 0666 it on the host."
        return _no(f"this user may not open {', '.join(locked)}", hint)
    return None


def _no_cuda(torch: Any) -> Availability | None:
    """Ask the driver itself, whose answer torch passes on as a warning at most."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return _no(f"the driver's library does not load ({error})", f"In a container: {_CONTAINER}.")
    answer = driver.cuInit(0)
    release = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(release))
    major, wanted = release.value // 1000, torch.version.cuda
    if 0 < major < numbers(wanted)[0]:
        has = f"{major}.{release.value % 1000 // 10}"
        oldest = DRIVER_OF_CUDA.get(numbers(wanted)[0], "a newer one")
        return _no(
            f"the driver runs CUDA {has}, and torch {torch.__version__} needs {wanted}",
            f"Update the NVIDIA driver to {oldest} or newer, or install a torch built for CUDA {major}.",
        )
    if answer in CODES:
        reason, hint = CODES[answer]
        return _no(f"{reason} (cuInit: {answer})", hint)
    return None


# -------------------------------------------------------------------------
# The devices
# -------------------------------------------------------------------------


def _no_device(torch: Any) -> Availability | None:
    """Tell hidden GPUs from those that are divided into no parts, and from none."""
    count, visible = torch.cuda.device_count(), os.environ.get(VISIBLE_DEVICES)
    if count and torch.cuda.is_available():
        return None
    if not count and visible is not None:
        listed = "names no GPU of this host" if visible.strip(", ") not in ("", "-1") else "hides every GPU"
        return _no(f"{VISIBLE_DEVICES}={visible!r} {listed}", f"unset {VISIBLE_DEVICES}")
    divided = _divided()
    if divided:
        return _no(
            f"GPU {divided[0]} is in MIG mode, and no part of it is visible",
            f"Make one: nvidia-smi mig -i {divided[0]} -cgi 0 -C; or end it with -mig 0.",
        )
    if count:
        return _no(
            f"torch cannot use the GPU ({_failure(torch)})", "Run nvidia-smi, and look into dmesg for Xid."
        )
    return _no("the NVIDIA driver reports no GPU", "Run nvidia-smi: it must list a GPU.")


def _divided() -> list[int]:
    """Return the numbers of the GPUs in MIG mode, as far as NVML is there to tell."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    nvml: Any = importlib.import_module("pynvml")
    divided = []
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            try:
                if nvml.nvmlDeviceGetMigMode(handle)[0]:
                    divided.append(index)
            except nvml.NVMLError:  # a GPU that cannot be divided
                continue
    except nvml.NVMLError:
        return divided
    return divided


def _failure(torch: Any) -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "it does not say why"


def _devices(torch: Any) -> Availability:
    count, built_for = torch.cuda.device_count(), torch.cuda.get_arch_list()
    for index in range(count):
        capability = torch.cuda.get_device_capability(index)
        if not runs_on(built_for, capability):
            name, text = torch.cuda.get_device_name(index), ".".join(map(str, capability))
            return _no(
                f"torch {torch.__version__} has no code for {name} (compute capability {text}), "
                f"only {', '.join(built_for)}",
                f"Install a torch that is built for it: {INSTALL}.",
            )
    return Availability(ok=True, reason=f"{count} x {torch.cuda.get_device_name(0)}")
