"""Capability table: implementations of each hook and kernel operation, with plugin and version."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anygauge.kernels.table import KernelRow, resolve_kernels
from anygauge.observability.report.run_files import CAPABILITIES_FILE
from anygauge.plugins import PluginDistribution, Plugins, plugin_distributions, source_location
from anygauge_hooks.types import BackendSpec

__all__ = ["capabilities", "write_capabilities"]

_KERNEL_FIELDS = (
    *("op", "source", "owner", "package", "version", "location", "dtypes"),
    *("tolerance", "tolerance_reason", "is_reference"),
)
REGISTERS, KERNELS = "register_", "register_kernels"
"""Beginning of the names of hooks that register something by name, and the one that takes a backend."""
_logger = logging.getLogger(__name__)


def capabilities(plugins: Plugins, backend: BackendSpec) -> dict[str, Any]:
    """Return the implementations of hooks and ops on a backend, as JSON types.

    :raises PluginError: A kernel names an unknown op, or has not the signature of its op.
    :raises DuplicateNameError: Two kernels of one op and priority accept the same facts.
    """
    table, distribution = resolve_kernels(plugins, backend), plugin_distributions()
    return {
        "backend": backend.name,
        "hooks": list(_hook_rows(plugins, backend, distribution)),
        "registered": list(_registered_rows(plugins, distribution)),
        "kernels": [_kernel_row(row) for row in table.rows(distribution)],
        "left_out": [asdict(kernel) for kernel in table.left_out],
        "unknown_backends": plugins.unknown_backends(),
        "plugin_errors": {name: repr(error) for name, error in plugins.load_errors.items()},
    }


def write_capabilities(directory: Path, plugins: Plugins, backend: BackendSpec) -> None:
    """Write the capability table to the run directory; failures only warn."""
    try:
        table = json.dumps(capabilities(plugins, backend), indent=2, default=str)
        (directory / CAPABILITIES_FILE).write_text(f"{table}\n", encoding="utf-8")
    except Exception as error:  # noqa: BLE001 - foreign code: plugins list their kernels
        _logger.warning("there is no capability table of this run: %r", error)


def _hook_rows(
    plugins: Plugins, backend: BackendSpec, distribution: PluginDistribution
) -> Iterator[dict[str, Any]]:
    """Yield one row for each implementation that is called on a backend, and one for a hook without any."""
    for hook in plugins.hooks():
        implementations = plugins.implementations(hook, backend)
        for implementation in implementations:
            package, release = distribution(implementation.plugin_name)
            yield {
                "hook": hook,
                "plugin": implementation.plugin_name,
                "package": package,
                "version": release,
                "location": source_location(implementation.function),
            }
        if not implementations:
            yield {"hook": hook, **dict.fromkeys(("plugin", "package", "version", "location"))}


def _registered_rows(plugins: Plugins, distribution: PluginDistribution) -> Iterator[dict[str, Any]]:
    """Yield one row for each name that a plugin registered, such as a model family or a reward."""
    for hook in plugins.hooks():
        for owner, item in plugins.registered(hook) if hook.startswith(REGISTERS) and hook != KERNELS else ():
            package, release = distribution(owner)
            yield {
                "kind": hook.removeprefix(REGISTERS).replace("_", " "),
                "name": item.name,
                "architectures": list(getattr(item, "architectures", ())),
                "plugin": owner,
                "package": package,
                "version": release,
                "location": next(filter(None, map(source_location, _functions(plugins, hook, owner, item)))),
            }


def _functions(plugins: Plugins, hook: str, owner: str, item: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a registered item, and last the one that registered it."""
    for name in ("fn", "make", "serve", "probe"):
        if callable(function := getattr(item, name, None)):
            yield function
    yield getattr(plugins.manager.get_plugin(owner), hook)


def _kernel_row(row: KernelRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _KERNEL_FIELDS}
