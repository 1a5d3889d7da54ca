"""The plugin contract: markers, hook specifications and the types they exchange.

A backend or model package imports this package and nothing else of the project.
It imports no torch at run time.
"""

from __future__ import annotations

import pluggy

PROJECT = "anygauge"
CONTRACT_VERSION = 1
"""Version of the hook specifications and their types. It rises when a plugin that was right becomes wrong: a
hook or an argument goes or gets another meaning. A hook or an argument that is new does not change it."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = ["CONTRACT_VERSION", "PROJECT", "hookimpl", "hookspec"]
