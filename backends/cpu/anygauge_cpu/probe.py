"""Whether this host can run the CPU backend."""

from __future__ import annotations

import importlib.util

from anygauge_hooks.types import Availability

__all__ = ["probe"]


def probe() -> Availability:
    """Return whether torch is installed; the host itself is always there."""
    if importlib.util.find_spec("torch") is None:
        hint = "In a clone of anygauge: pip install -r requirements/cpu.txt"
        return Availability(ok=False, reason="torch is not installed", hint=hint)
    return Availability(ok=True, reason="the host's processors")
