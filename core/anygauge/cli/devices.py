"""The device that a plan is made for: as the user says, or as it is on this host."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from anygauge.cli.arguments import finite

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec

__all__ = ["DeviceFacts", "add_device_arguments", "backend_of_gpu", "device_facts"]

GPU = "GPU"
"""Scheduler resource of the backends whose devices are GPUs."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Memory and kind of a device."""

    memory: float | None
    """Bytes; ``None`` if nothing tells."""
    gpu: str | None
    """A name of :data:`anygauge.planning.rates.DEVICE_MEMORY`."""
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
    """Return the backend that a named GPU means; ``None`` without one, or if not just one has GPUs."""
    specs = plugins.collect("register_backends")
    names = [spec.name for spec in specs if spec.scheduler_resource == GPU]
    return names[0] if gpu is not None and len(names) == 1 else None


def device_facts(
    plugins: Plugins, backend: BackendSpec, gpu: str | None = None, gib: float | None = None
) -> DeviceFacts:
    """Return the device that a user named, or the first one of the backend here.

    :param gpu: Name of a kind of GPU.
    :param gib: Memory of a device in GiB.
    :raises UnknownNameError: No GPU of that name is known.
    """
    from anygauge.planning.memory import GIB
    from anygauge.planning.rates import DEVICE_MEMORY, gpu_name
    from anygauge_hooks.errors import UnknownNameError

    memory = None if gib is None else gib * GIB
    if gpu is not None:
        name = gpu_name(gpu)
        if name is None:
            known = ", ".join(DEVICE_MEMORY)
            raise UnknownNameError(
                f"--gpu {gpu}: not a known GPU; known: {known}.", hint="Give --device-memory GIB instead."
            )
        return DeviceFacts(memory or DEVICE_MEMORY[name], name)
    if memory is not None:
        return DeviceFacts(memory, None)
    return _present_device(plugins, backend)


def _present_device(plugins: Plugins, backend: BackendSpec) -> DeviceFacts:
    """Return the first device of a backend on this host, if it can run here."""
    from anygauge.planning.rates import gpu_name
    from anygauge_hooks.resources import read_memory

    if backend.visible_devices_env is None:
        return DeviceFacts(float(read_memory().total), None, is_here=True, is_host=True)
    if not backend.probe().ok:
        return DeviceFacts(None, None)
    device = plugins.make_device(backend, 0)
    total = device.memory().get("total")
    name = gpu_name(_name(device.torch_device))
    return DeviceFacts(None if total is None else float(total), name, is_here=True)


def _name(device: Any) -> str:
    """Return how a driver describes a device; empty where torch has no such function."""
    import torch

    describe = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if describe is None else str(describe(device))
