"""What this process may use of the host: affinity and cgroup limits, not what the machine has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Cpus", "Memory", "read_cpus", "read_memory"]

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Cpus:
    """Processors of the host and the share of them that is usable."""

    present: int
    usable: float
    reason: str
    """What limits them, or an empty string."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory."""

    total: int
    """Of the host, or the cgroup's limit if that is less."""
    available: int
    reason: str
    """What limits them, or an empty string."""


def read_cpus(cgroup: Path = CGROUP) -> Cpus:
    """Return the processors that this process may use."""
    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    if quota is not None and quota < allowed:
        return Cpus(present, quota, "cgroup quota")
    return Cpus(present, allowed, "affinity mask" if allowed < present else "")


def read_memory(cgroup: Path = CGROUP) -> Memory:
    """Return the memory that this process may use."""
    host = psutil.virtual_memory()
    limit = _integer(cgroup / "memory.max") or _integer(cgroup / "memory/memory.limit_in_bytes")
    if limit is None or limit >= host.total:
        return Memory(host.total, host.available, "")
    used = _integer(cgroup / "memory.current") or _integer(cgroup / "memory/memory.usage_in_bytes") or 0
    return Memory(limit, min(host.available, max(limit - used, 0)), "cgroup limit")


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
