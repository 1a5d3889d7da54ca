"""Installed distributions, and whether they fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["Requires", "read_installed"]

ROOT = "anygauge"


@dataclass(frozen=True, slots=True)
class Requires:
    """One requirement of one installed distribution."""

    owner: str
    name: str
    wanted: str
    """Version specifier; empty for any."""
    installed: str | None
    ok: bool

    @property
    def fix(self) -> str:
        """The command that meets it."""
        return f"pip install '{self.name}{self.wanted}'"


def read_installed() -> list[Requires]:
    """Return every requirement of this project's distributions, direct or not, installed or missing.

    The direct ones come first. Optional requirements are listed only where they are installed.
    """
    version = cache(_version)  # many ask for the same, and each answer parses its metadata
    owners = sorted({name for each in distributions() if (name := _canonical(each)).startswith(ROOT)})
    rows = [row for owner in owners for row in _direct(owner, version, optional=True)]
    seen = {*owners, *(row.name for row in rows)}
    queue = [row.name for row in rows if row.installed]
    while queue:
        for row in _direct(queue.pop(0), version, optional=False):
            rows.append(row)
            if row.installed and row.name not in seen:
                seen.add(row.name)
                queue.append(row.name)
    return rows


def _canonical(package: Distribution) -> str:
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(package.name))


def _direct(owner: str, version: Callable[[str], str | None], *, optional: bool) -> Iterator[Requires]:
    from packaging.utils import canonicalize_name

    for requirement, is_extra in _requirements(owner, optional):
        name = str(canonicalize_name(requirement.name))
        installed = version(name)
        if is_extra and installed is None:
            continue
        ok = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        yield Requires(owner, name, str(requirement.specifier), installed, ok)


def _requirements(owner: str, optional: bool) -> Iterator[tuple[Requirement, bool]]:
    """Yield what a distribution requires on this platform, and whether only an extra asks for it."""
    from packaging.requirements import Requirement

    package = distribution(owner)
    extras = (package.metadata.get_all("Provides-Extra") or []) if optional else []
    for text in package.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement, False
        elif any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement, True


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None
