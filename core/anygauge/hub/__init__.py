"""Models and data by name: a local path, the cache of a hub, or a download from it."""

from __future__ import annotations

from anygauge.hub.resolve import cached_model, localized, pinned, sizes_command, unresolved

__all__ = ["cached_model", "localized", "pinned", "sizes_command", "unresolved"]
