"""CPU and memory limits of this process: affinity and cgroups, not the machine's totals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Cpus", "Memory", "read_cpus", "read_memory", "read_oom_kills"]

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Cpus:
    """Processors of the host and the share of them that is usable."""

    present: int
    usable: float
    reason: str
    """Source of the limit, or an empty string."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory."""

    total: int
    """Memory of the host, or the cgroup's limit if that is lower."""
    available: int
    used: int
    """Bytes used on the host, or in the cgroup whose limit applies; reclaimable file cache is not counted."""
    reason: str
    """Source of the limit, or an empty string."""


def read_cpus(cgroup: Path = CGROUP) -> Cpus:
    """Return the processors that this process may use."""
    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    if quota is not None and quota < allowed:
        return Cpus(present, quota, "cgroup quota")
    return Cpus(present, allowed, "affinity mask" if allowed < present else "")


def read_memory(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> Memory:
    """Return the memory that this process may use.

    A limit may be set on the process's cgroup or on any that it is in; the least counts.
    """
    host = psutil.virtual_memory()
    folders = _memory_cgroups(cgroup, membership)
    limits = [(limit, folder) for folder in folders if (limit := _memory_limit(folder)) is not None]
    limit, folder = min(limits, default=(host.total, cgroup))
    if limit >= host.total:
        return Memory(host.total, host.available, host.total - host.available, "")
    used = _memory_used(folder)
    return Memory(limit, min(host.available, max(limit - used, 0)), used, "cgroup limit")


def read_oom_kills(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return how many processes of this process's own cgroup the kernel has killed for want of memory."""
    counts = [_oom_kills(folder) for folder in _memory_cgroups(cgroup, membership)]
    return next((count for count in reversed(counts) if count is not None), 0)


def _oom_kills(folder: Path) -> int | None:
    text = _text(folder / "memory.events") or _text(folder / "memory.oom_control") or ""
    counts = [line.split()[1] for line in text.splitlines() if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def _memory_cgroups(cgroup: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the memory cgroups (v2 and v1) of this process, and of those that they are in."""
    mounts = {"": cgroup, "memory": cgroup / "memory"}
    yield from mounts.values()
    for line in (_text(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in mounts:
                parts = Path(path).parts[1:]
                yield from (mounts[controller].joinpath(*parts[:count]) for count in range(1, len(parts) + 1))


def _memory_limit(folder: Path) -> int | None:
    return _integer(folder / "memory.max") or _integer(folder / "memory.limit_in_bytes")


def _memory_used(folder: Path) -> int:
    """Return the bytes in use without the files that the kernel only keeps until it needs the room."""
    used = _integer(folder / "memory.current") or _integer(folder / "memory.usage_in_bytes") or 0
    pairs = (line.split() for line in (_text(folder / "memory.stat") or "").splitlines())
    stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    return max(used - stat.get("total_inactive_file", stat.get("inactive_file", 0)), 0)


def _cpu_quota(cgroup: Path) -> float | None:
    """Return the processors that a cgroup (v2, else v1) grants, or ``None`` without a limit."""
    text = _text(cgroup / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    microseconds, each = _integer(cgroup / "cpu/cpu.cfs_quota_us"), _integer(cgroup / "cpu/cpu.cfs_period_us")
    return microseconds / each if microseconds and each and microseconds > 0 else None


def _integer(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
