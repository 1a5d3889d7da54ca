"""Parts of ``BackendSpec.host_checks`` that backends share; nothing is imported to look for it."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from anygauge_hooks.types import HostCheck

__all__ = [
    "Checks",
    "Host",
    "absent",
    "architecture",
    "failed",
    "installed",
    "limits",
    "passed",
    "refused",
    "text_of",
    "unknown",
]

Checks = Iterator[HostCheck]

MACHINES = ("aarch64", "x86_64")
SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm that Ray's object store, data loaders and communication want; Docker gives 64 MiB."""
OPEN_FILES = 4096


def passed(name: str, found: str) -> HostCheck:
    """Return the check of a part that is there and right."""
    return HostCheck(name=name, status="PASS", found=found)


def failed(name: str, found: str, fix: str) -> HostCheck:
    """Return the check of a part that is there and wrong."""
    return HostCheck(name=name, status="FAIL", found=found, fix=fix)


def absent(name: str, found: str, fix: str) -> HostCheck:
    """Return the check of a part that is not there."""
    return HostCheck(name=name, status="NOT INSTALLED", found=found, fix=fix)


def unknown(name: str, found: str, fix: str | None = None) -> HostCheck:
    """Return the check of a part that nothing tells to be right or wrong."""
    return HostCheck(name=name, status="UNKNOWN", found=found, fix=fix)


def installed(name: str) -> Distribution | None:
    """Return an installed distribution."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def refused(owner: Distribution, needed: Distribution) -> str | None:
    """Return the releases of ``needed`` that ``owner`` asks for, if the installed one is none of them."""
    from packaging.requirements import Requirement

    for text in owner.requires or ():
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == needed.name and applies:
            specifier = requirement.specifier
            return None if specifier.contains(needed.version, prereleases=True) else str(specifier)
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """Where to look."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    machine: str = field(default_factory=platform.machine)

    def device_files(self, prefix: str) -> list[str]:
        """Return the names in ``/dev`` that are a prefix and a number, in the order of the numbers."""
        ends = [path.name.removeprefix(prefix) for path in (self.root / "dev").glob(f"{prefix}*")]
        return [f"{prefix}{number}" for number in sorted(int(end) for end in ends if end.isdecimal())]


def text_of(file: Path) -> str:
    """Return the text of a file, or none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def architecture(machine: str, package: str) -> HostCheck:
    """Check that a vendor's torch has wheels for a machine.

    :param package: Its name in the message.
    """
    if machine in MACHINES:
        return passed("architecture", machine)
    return failed("architecture", machine, f"{package} has wheels for {' and '.join(MACHINES)} alone")


def limits(root: Path) -> Checks:
    """Check the shared memory and the open files of this process."""
    shared = root / "dev/shm"
    if shared.is_dir():
        stats = os.statvfs(shared)
        size = stats.f_frsize * stats.f_blocks
        if size < SHARED_MEMORY:
            fix = "start the container with --shm-size=64g, or --ipc=host"
            yield failed("shared memory", f"/dev/shm has {size >> 20} MiB", fix)
        else:
            yield passed("shared memory", f"{size >> 30} GiB")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:
        yield failed("open files", f"at most {soft}", "ulimit -n 65536; a container: --ulimit nofile=65536")
    else:
        yield passed("open files", "unlimited" if soft < 0 else f"at most {soft}")
