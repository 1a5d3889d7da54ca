"""Property tests draw the same examples on every run, and no busy host fails them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("anygauge", derandomize=True, deadline=None)
settings.load_profile("anygauge")
