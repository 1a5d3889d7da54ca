"""The part of ``anygauge doctor`` that runs vendor code, in a process of its own.

``python -m anygauge.cli.probe backend ENTRY`` loads one backend plugin and probes its backends, then imports
torch; ``python -m anygauge.cli.probe plugins`` loads every plugin. One JSON object goes to stdout, whatever
else prints there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from anygauge.cli.torch_extensions import AUTOLOAD, extension_failure
from anygauge.distributed.garbage import skip_last_collection
from anygauge.plugins import load_plugins, probe_backend
from anygauge_hooks.types import Availability, BackendSpec, HostCheck

__all__ = ["main"]


def main(argv: list[str]) -> None:
    """Write the answer to one question."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    report = _plugins() if argv[0] == "plugins" else _backend(argv[1])
    with answer:
        json.dump(report, answer)


def _backend(entry: str) -> dict[str, Any]:
    plugins = load_plugins(only=[entry])
    if entry in plugins.load_errors:
        reason = f"its plugin failed to load: {plugins.load_errors[entry]!r}"
        return {"rows": [_row(entry, Availability(ok=False, reason=reason, hint="Reinstall the backend."))]}
    specs = [spec for owner, spec in plugins.answers("register_backends") if owner.startswith(entry)]
    return {"rows": [_row(spec.name, _available(spec)) for spec in specs]}


def _available(spec: BackendSpec) -> Availability:
    availability = probe_backend(spec)
    return (_torch_failure() or availability) if availability.ok else availability


def _torch_failure() -> Availability | None:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - foreign code: vendors' extensions of torch
        if (failure := extension_failure(error)) is not None:
            hint = f"export {AUTOLOAD}=0, or do what the row of the extension's backend says"
            return Availability(ok=False, reason=failure.args[0].rstrip("."), hint=hint)
        hint = "Reinstall torch: pip install --force-reinstall torch"
        return Availability(ok=False, reason=f"`import torch` raised {error!r}", hint=hint)
    del torch
    return None


def _row(name: str, availability: Availability) -> dict[str, Any]:
    return {"name": name, **dataclasses.asdict(availability)}


def _plugins() -> dict[str, Any]:
    plugins = load_plugins()
    return {
        "errors": {name: repr(error) for name, error in plugins.load_errors.items()},
        "environment": plugins.environment(),
        "checks": {spec.name: _checks(spec) for spec in plugins.collect("register_backends")},
    }


def _checks(spec: BackendSpec) -> list[dict[str, Any]]:
    """Return a backend's checks of the host; a check that raises becomes a row too."""
    if spec.host_checks is None:
        return []
    try:
        return [dataclasses.asdict(check) for check in spec.host_checks()]
    except Exception as error:  # noqa: BLE001 - foreign code: a backend's checks
        fix = "Report this to the maintainers of the backend."
        return [dataclasses.asdict(HostCheck(name="checks", status="FAIL", found=repr(error), fix=fix))]


if __name__ == "__main__":
    main(sys.argv[1:])
    skip_last_collection()
