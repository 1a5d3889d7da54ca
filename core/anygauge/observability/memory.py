"""Memory of the host, of the processes and of the devices, cheap enough to read in every step."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

from anygauge.device import take_peak_memory
from anygauge.observability.host import read_memory
from anygauge_hooks.types import Device

__all__ = ["driver_memory", "memory_metrics", "resident_bytes", "worker_memory"]

GIB = float(1 << 30)
STATM = Path("/proc/self/statm")


def worker_memory(device: Device) -> dict[str, float]:
    """Return what a worker reports of a step, in bytes.

    ``rss`` is the resident memory of the process. ``device`` is the most that was allocated on its device at
    once in the phases since the last call, or what is allocated now where the device does not know.
    """
    used = take_peak_memory() or device.memory().get("allocated")
    return {"rss": float(resident_bytes()), **({} if used is None else {"device": float(used)})}


def memory_metrics(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return ``perf/*_gib`` of the worker that uses most of each.

    :param reports: One for each worker, from :func:`worker_memory`.
    """
    names = {"rss": "perf/worker_rss_gib", "device": "perf/device_memory_gib"}
    found = {name: [report[key] for report in reports if key in report] for key, name in names.items()}
    return {name: max(values) / GIB for name, values in found.items() if values}


def driver_memory() -> dict[str, float]:
    """Return ``perf/host_memory_*`` and ``perf/driver_rss_gib``, of the host that the driver runs on.

    Where a cgroup limits the run's memory, the host is what the cgroup leaves of it.
    """
    memory = read_memory()
    return {
        "perf/host_memory_gib": memory.used / GIB,
        "perf/host_memory_ratio": memory.used / memory.total,
        "perf/driver_rss_gib": resident_bytes() / GIB,
    }


def resident_bytes() -> int:
    """Return the resident memory of this process, pages that it shares with others included."""
    pages = STATM.read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()
