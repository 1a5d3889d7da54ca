"""Property tests draw the same examples on every run, and no busy host fails them."""

from __future__ import annotations

from importlib.util import find_spec

from hypothesis import settings

from anygauge_cpu.env import hide_extensions

settings.register_profile("anygauge", derandomize=True, deadline=None)
settings.load_profile("anygauge")

# Transformers imports torch-npu with every model, which fails without CANN. Runs on the CPU hide it, too.
if find_spec("torch_npu"):
    hide_extensions()
