"""Every fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module

from backend_faults.fault import Fault, unchanged

MODULES = (
    *("hooks", "collectives", "communication", "devices", "optimizers"),
    *("ops", "loss_and_expert_ops", "kernel_arguments", "kernel_numbers", "usual_sizes"),
)
"""The first imports no torch: its faults are in hooks that must not."""

EXPLAINED: dict[tuple[str, str], str] = {
    ("cpu", "register_backends.local_device_id"): "a host is one device, whatever its index",
    (
        "cpu",
        "groups.communicator_of_one",
    ): "runs of several ranks on Gloo use the core's own communicator, never the hook's",
}
"""Faults that may escape, by the names of backend and fault: why they are none there, or cannot be told."""


def faults() -> Iterator[Fault]:
    """Yield every fault."""
    for module in MODULES:
        yield from _faults_of(module)


def find(name: str) -> Fault:
    """Return a fault by name, or one that changes nothing without."""
    if not name:
        return Fault("", "nothing is broken", "", unchanged)
    return next(fault for fault in faults() if fault.name == name)


def hooks() -> str:
    """Return the hooks of all faults."""
    return " ".join({hook: None for fault in faults() for hook in fault.hook.split()})


def module_of(fault: Fault) -> str:
    """Return the module of a fault."""
    return next(module for module in MODULES if fault in _faults_of(module))


def _faults_of(module: str) -> Sequence[Fault]:
    members: Sequence[Fault] = import_module(f"backend_faults.{module}").FAULTS
    return members
