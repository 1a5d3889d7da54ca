"""What a worker's process is given, and which NPU it takes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from anygauge_hooks.errors import PlacementError
from anygauge_hooks.types import AcceleratorIds, ConfigChange

__all__ = [
    "DETERMINISTIC",
    "HIDDEN",
    "VISIBLE_DEVICES",
    "WORKER",
    "config_defaults",
    "import_vendor",
    "local_device",
    "network",
    "ray_options",
]

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"

WORKER: Mapping[str, str] = {
    # several processes on one NPU or host must not ask for the same listening ports
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
}
FAMILIES: Mapping[str, str] = {"4": "AF_INET", "6": "AF_INET6"}
"""Address families by IP version, as HCCL names them."""
DETERMINISTIC: Mapping[str, str] = {
    # reductions of the two communication libraries in one order
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    # matrix products: no shift along K, no shuffle of it, and none that overlaps with communication
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
}
"""Added in a deterministic run."""
HIDDEN: Mapping[str, str] = {VISIBLE_DEVICES: "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def ray_options(count: int) -> Mapping[str, Any]:
    """Return Ray actor options that reserve ``count`` NPUs, a custom resource to Ray."""
    return {"num_cpus": 0, "resources": {"NPU": count}}


def local_device(ray_ids: AcceleratorIds, environ: Mapping[str, str]) -> int:
    """Return the index, inside this process, of the NPU that it was assigned.

    :param ray_ids: Physical indices, the first of which counts.
    :param environ: The environment of the process; its visible-devices list gives the numbering.
    :raises PlacementError: There is none, or the process cannot see it.
    """
    text = environ.get(VISIBLE_DEVICES)
    visible = None if text is None else _listed(text)
    if not ray_ids:
        raise PlacementError(
            "This worker was assigned no NPU.",
            hint="Report this to whoever placed it: its actor reserved none.",
        )
    wanted = int(ray_ids[0])
    if visible is None:
        return wanted
    if wanted in visible:
        return visible.index(wanted)
    raise PlacementError(
        f"The assigned NPU {wanted} is not visible here: {VISIBLE_DEVICES} is {text!r}.",
        hint=f"Start Ray with the same {VISIBLE_DEVICES} as the run, or leave the variable to Ray.",
    )


def import_vendor() -> None:
    """Import torch-npu, also where torch was told not to load extensions by itself."""
    importlib.import_module("torch_npu")


def network(interface: str | None, ip_version: str) -> Mapping[str, str]:
    """Return the variables that choose what HCCL connects through.

    :param ip_version: ``"4"`` or ``"6"``; anything else leaves the choice to HCCL.
    """
    chosen = {
        "HCCL_SOCKET_IFNAME": f"={interface}" if interface else None,  # without "=" it is a prefix
        "HCCL_SOCKET_FAMILY": FAMILIES.get(ip_version),
    }
    return {name: value for name, value in chosen.items() if value is not None}


def config_defaults() -> Sequence[ConfigChange]:
    """Return the keys that this backend fills in."""
    return [ConfigChange(path="train.dtype", value="bfloat16", reason="cube units")]


def _listed(text: str) -> list[int]:
    """Return the entries that CANN honours: those before the first that is no index."""
    entries: list[int] = []
    for entry in (part.strip() for part in text.split(",")):
        if not entry.isdecimal():
            break
        entries.append(int(entry))
    return entries
