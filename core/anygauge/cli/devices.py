"""The device that a plan is made for: as the user says, or as it is on this host."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from anygauge.cli.arguments import finite

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec

__all__ = ["DeviceFacts", "add_device_arguments", "backend_of_gpu", "device_facts"]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Memory and kind of a device."""

    memory: float | None
    """Bytes; ``None`` if nothing tells."""
    gpu: str | None
    """A name of :attr:`anygauge_hooks.types.BackendSpec.device_memory`."""
    is_here: bool = False
    """Whether the device is one of this host."""
    is_host: bool = False
    """Whether its memory is the host's, which all workers share."""


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which device a plan is for."""
    parser.add_argument(
        "--device-memory",
        metavar="GIB",
        type=partial(finite, unit=" of GiB"),
        help="memory of a device; default: that of --gpu, or of this host's device",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="kind of GPU, such as H200, and its backend; default: this host's, if it is known",
    )


def backend_of_gpu(plugins: Plugins, gpu: str | None) -> str | None:
    """Return the backend that has a named GPU; ``None`` without a name, or if several have it.

    :raises UnknownNameError: No backend names it.
    """
    if gpu is None:
        return None
    specs: list[BackendSpec] = plugins.collect("register_backends")
    backends = [spec.name for spec in specs if gpu_name(gpu, spec.device_memory)]
    if not backends:
        raise _unknown(gpu, "known", [name for spec in specs for name in spec.device_memory])
    return backends[0] if len(backends) == 1 else None


def device_facts(
    plugins: Plugins, backend: BackendSpec, gpu: str | None = None, gib: float | None = None
) -> DeviceFacts:
    """Return the device that a user named, or the first one of the backend here.

    :param gpu: Name of a kind of GPU.
    :param gib: Memory of a device in GiB.
    :raises UnknownNameError: The backend does not name it.
    """
    from anygauge.planning.memory import GIB

    memory = None if gib is None else gib * GIB
    if gpu is not None:
        name = gpu_name(gpu, backend.device_memory)
        if name is None:
            raise _unknown(gpu, f"backend {backend.name} knows", [*backend.device_memory])
        return DeviceFacts(memory or backend.device_memory[name], name)
    if memory is not None:
        return DeviceFacts(memory, None)
    return _present_device(plugins, backend)


def _unknown(gpu: str, who: str, names: Collection[str]) -> Exception:
    from anygauge_hooks.errors import UnknownNameError

    return UnknownNameError(
        f"--gpu {gpu}: not a known GPU; {who}: {', '.join(names) or 'none'}.",
        hint="Give --device-memory GIB instead, or name or install the backend that has it.",
    )


def gpu_name(text: str, names: Collection[str]) -> str | None:
    """Return which of some names is that of a device, as a user or its driver has it.

    >>> names = ("A100", "A100-40", "H200")
    >>> [gpu_name(text, names) for text in ("NVIDIA H200", "h200", "A100-40", "A100-SXM4-40GB", "V100")]
    ['H200', 'H200', 'A100-40', 'A100-40', None]
    """
    text = text.upper()
    name = next((word for word in (text, *text.replace("-", " ").split()) if word in names), None)
    size = re.search(r"(\d+) ?GB", text)
    with_size = f"{name}-{size[1]}" if size else ""
    return with_size if with_size in names else name


def _present_device(plugins: Plugins, backend: BackendSpec) -> DeviceFacts:
    """Return the first device of a backend on this host, if it can run here."""
    from anygauge_hooks.resources import read_memory

    if backend.visible_devices_env is None:
        return DeviceFacts(float(read_memory().total), None, is_here=True, is_host=True)
    if not backend.probe().ok:
        return DeviceFacts(None, None)
    device = plugins.make_device(backend, 0)
    total = device.memory().get("total")
    name = gpu_name(_name(device.torch_device), backend.device_memory)
    return DeviceFacts(None if total is None else float(total), name, is_here=True)


def _name(device: Any) -> str:
    """Return how a driver describes a device; empty where torch has no such function."""
    import torch

    describe = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if describe is None else str(describe(device))
