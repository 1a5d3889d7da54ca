"""The plugin contract: markers, hook specifications and the types they exchange.

A backend or model package imports this package and nothing else of the project.
It imports no torch at run time.
"""

from __future__ import annotations

import pluggy

PROJECT = "anygauge"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = ["PROJECT", "hookimpl", "hookspec"]
