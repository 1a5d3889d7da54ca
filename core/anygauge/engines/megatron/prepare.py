"""Preparation before the first import of Megatron."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from anygauge_hooks.errors import ScopeError
from anygauge_hooks.types import BackendSpec, LoadedPlugins

__all__ = ["JIT_MODULE", "prepare_megatron"]

JIT_MODULE = "megatron.core.jit"
"""The module that Megatron takes its fuser from. It decides on ``torch.compile`` while it is imported, and 41
functions are decorated before anything else could change that: it must be there first."""

_UPSTREAM_WARNINGS = (
    # the optimizer's shards of float32 weights are views, whose gradients Megatron sets itself
    "The .grad attribute of a Tensor that is not a leaf",
    # torch 2.13 deprecates names that megatron-core 0.16.1 still calls
    r"`torch\.distributed\.\w+` is deprecated",
    "Please use DTensor instead",
    # the device of a barrier is the current one, as torch guesses
    r"barrier\(\): using the device",
)
"""About code of others; a user can do nothing about them."""

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def prepare_megatron(plugins: LoadedPlugins, backend: BackendSpec) -> None:
    """Give Megatron the backend's fuser. Later calls with the same backend do nothing.

    :param plugins: Their ``make_jit_fuser`` is asked; without an answer functions stay as they are.
    :param backend: The backend of this process.
    :raises ScopeError: Megatron was imported before, or prepared for another backend.
    """
    # At import Megatron names every optional library that it does not find.
    warnings.filterwarnings("ignore", module="megatron")
    for message in _UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    module = sys.modules.get(JIT_MODULE)
    prepared_for = getattr(module, "prepared_for", None)
    if prepared_for == backend.name:
        return
    if prepared_for is not None:
        raise ScopeError(
            f"Megatron is prepared for backend {prepared_for!r} in this process, not for {backend.name!r}.",
            hint="Run each backend in a process of its own.",
        )
    if "megatron.core" in sys.modules:
        raise ScopeError(
            "Megatron was imported before it was prepared: its functions are bound to its own fuser.",
            hint="Call prepare_megatron first; no module may import megatron at its top before that.",
        )
    sys.modules[JIT_MODULE] = _jit_module(plugins.first("make_jit_fuser", backend=backend), backend.name)


def _jit_module(fuser: _Decorator | None, prepared_for: str) -> ModuleType:
    """Return a module with the names of Megatron's own."""

    def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    module = ModuleType(JIT_MODULE, "The backend's jit fuser, in the place of Megatron's.")
    vars(module).update(
        jit_fuser=fuser or unchanged,
        noop_decorator=unchanged,
        enable_jit_fuser=lambda: None,
        disable_jit_fuser=lambda: None,
        prepared_for=prepared_for,
    )
    return module
