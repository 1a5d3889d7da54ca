"""Profiles and the timeline."""

from __future__ import annotations

from anygauge.config.schema.section import NonNegative, Positive, Section

__all__ = ["Profile"]


class Profile(Section):
    """Profiles of some steps, and the timeline of the whole run."""

    steps: tuple[Positive, ...] = ()
    """Steps to record a profile of, such as ``[3, 20]``; the first step of a run is 1."""
    kind: str = "torch"
    """``torch`` (operators and kernels), the name of the rollout engine if its servers can be profiled
    (``sglang``), or a kind of the backend: ``memory`` (history of allocations) on ``cuda`` and ``npu``,
    ``npu`` (Ascend's profiler) on ``npu``."""
    ranks: tuple[NonNegative, ...] = ()
    """Workers, or servers, to record; ``[]`` records all. Profiles are large: of many ranks, take a few."""
    timeline: bool = True
    """Write ``timeline.json``: what each process and each server did when."""
