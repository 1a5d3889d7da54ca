"""Parts of a backend that vendors do alike: which of a host's devices a process sees, and its sockets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anygauge_hooks.errors import PlacementError
from anygauge_hooks.types import AcceleratorIds

__all__ = ["VisibleDevices", "socket_variables"]

FAMILIES: Mapping[str, str] = {"4": "AF_INET", "6": "AF_INET6"}
"""Address families by IP version, as communication libraries name them."""


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The environment variable that lists the devices a process sees, in the order that numbers them."""

    noun: str
    """Name of one device in messages."""
    variable: str
    entries: Callable[[str], Sequence[str]]
    """Return the entries of a value that the driver honors."""
    is_same: Callable[[str, str], bool] = operator.eq
    """Return whether an entry and an id name one device."""

    def local_index(self, ray_ids: AcceleratorIds, environ: Mapping[str, str]) -> int:
        """Return the index, inside this process, of the device that it was assigned.

        :param ray_ids: The first counts.
        :param environ: The environment of the process.
        :raises PlacementError: There is none, or the process cannot see it.
        """
        if not ray_ids:
            raise PlacementError(
                f"This worker was assigned no {self.noun}.",
                hint="Report this as a bug of the launcher: its actor reserved none.",
            )
        text, wanted = environ.get(self.variable), str(ray_ids[0])
        if text is None and wanted.isdecimal():
            return int(wanted)
        for index, entry in enumerate(self.entries(text or "")):
            if self.is_same(entry, wanted):
                return index
        raise PlacementError(
            f"The assigned {self.noun} {wanted} is not visible here: {self.variable} is {text!r}.",
            hint=f"Start Ray with the same {self.variable} as the run, or leave the variable to Ray.",
        )

    def require(self, index: int, count: int, environ: Mapping[str, str]) -> None:
        """Refuse an index that the vendor's library would only call invalid.

        :param count: Devices that the process sees.
        """
        if index >= count:
            raise PlacementError(
                f"This worker needs {self.noun} {index} (counted from 0), but its process sees {count}: "
                f"{self.variable} is {environ.get(self.variable)!r}.",
                hint="Lower placement.train_workers or placement.rollout_workers to as many "
                f"{self.noun}s as there are.",
            )


def socket_variables(library: str, interface: str | None, ip_version: str) -> Mapping[str, str]:
    """Return the variables that choose what a communication library connects through.

    :param library: Prefix of the variables' names, such as ``NCCL``.
    :param ip_version: ``"4"`` or ``"6"``; anything else leaves the choice to the library.
    """
    chosen = {
        f"{library}_SOCKET_IFNAME": f"={interface}" if interface else None,  # without "=" it is a prefix
        f"{library}_SOCKET_FAMILY": FAMILIES.get(ip_version),
    }
    return {name: value for name, value in chosen.items() if value is not None}
