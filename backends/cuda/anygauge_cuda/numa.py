"""The cores that are nearest to a GPU: host memory that they touch first is on its side of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from anygauge_cuda.nvml import find_gpu

__all__ = ["BIND", "bind_to_device", "near_cores"]

BIND = "ANYGAUGE_CUDA_BIND"
"""``0`` leaves a process on the cores that it was started on."""
_DEVICES = Path("/sys/bus/pci/devices")
_TASKS = Path("/proc/self/task")


def bind_to_device() -> None:
    """Keep this process, with the threads that it has, on those of its cores that are near its GPU."""
    if os.environ.get(BIND) == "0":
        return
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    near = near_cores(str(properties.uuid))
    allowed = os.sched_getaffinity(0)
    chosen = allowed & near
    if not chosen or chosen == allowed:
        return
    for task in _TASKS.iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task.name), chosen)
    # threads beyond the cores would have those of one operation wait for each other
    torch.set_num_threads(min(torch.get_num_threads(), len(chosen)))


def near_cores(uuid: str, devices: Path = _DEVICES) -> set[int]:
    """Return the numbers of the cores on a GPU's side of the machine; none if that is not known."""
    handles = find_gpu(uuid)
    if handles is None:
        return set()
    nvml, gpu = handles
    try:
        address: str | bytes = nvml.nvmlDeviceGetPciInfo(gpu).busId
        text = address.decode() if isinstance(address, bytes) else address
        name = text.lower()[-len("0000:00:00.0") :]  # NVML writes a longer domain than the kernel
        return set(_numbers((devices / name / "local_cpulist").read_text(encoding="ascii")))
    except (OSError, nvml.NVMLError):
        return set()


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as ``0-3,8``."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
