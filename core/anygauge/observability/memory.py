"""Memory of the host, of the processes and of the devices, and their meters, cheap enough for every step."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from anygauge.device import take_peak_memory
from anygauge_hooks.resources import read_memory
from anygauge_hooks.types import Device

__all__ = ["driver_memory", "memory_metrics", "resident_bytes", "worker_memory"]

GIB = float(1 << 30)
STATM = Path("/proc/self/statm")

METERS: Mapping[str, Mapping[str, Callable[[list[float]], float]]] = {
    "utilization": {"perf/device_utilization": fmean, "perf/device_utilization_min": min},
    "power": {"perf/device_power_w": fmean},
    "temperature": {"perf/device_temperature_c": max},
    "clock": {"perf/device_clock_mhz": min},
    "power_capped": {"perf/device_power_capped": max},
    "thermal_slowed": {"perf/device_thermal_slowed": max},
}
"""Metrics, and how the values of all devices are reduced to one, by their names in :meth:`Device.meters`."""


def worker_memory(device: Device) -> dict[str, float]:
    """Return a worker's memory of a step in bytes, and the meters of its device.

    ``rss`` is the resident memory of the process. ``device`` is the most that was allocated on its device at
    once in the phases since the last call, or what is allocated now where the device does not know.
    """
    used = take_peak_memory() or device.memory().get("allocated")
    known = {} if used is None else {"device": float(used)}
    return {"rss": float(resident_bytes()), **known, **device.meters()}


def memory_metrics(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return ``perf/*_gib`` of the worker that uses most of each, and ``perf/device_*`` of their meters.

    :param reports: One for each worker, from :func:`worker_memory`.
    """
    names = {"rss": "perf/worker_rss_gib", "device": "perf/device_memory_gib"}
    memory = {name: max(values) / GIB for key, name in names.items() if (values := _of_all(reports, key))}
    meters = {
        name: float(of(values))
        for key, metrics in METERS.items()
        if (values := _of_all(reports, key))
        for name, of in metrics.items()
    }
    return memory | meters


def _of_all(reports: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [report[key] for report in reports if key in report]


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
