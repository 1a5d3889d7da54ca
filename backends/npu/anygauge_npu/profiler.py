"""Profiles of an NPU: Ascend's own profiler, and the history of torch-npu's allocations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from anygauge_npu.device import vendor_module

__all__ = ["make_profiler"]

EVENTS = 1_000_000
"""Most allocations and frees that are kept; of more, the latest."""


def make_profiler(kind: str, path: str) -> AbstractContextManager[Any] | None:
    """Return a profiler of this backend, or ``None`` for a kind that is not its own."""
    if kind == "memory":
        return memory_profile(path)
    return ascend_profile(path) if kind == "npu" else None


@contextmanager
def memory_profile(path: str) -> Iterator[None]:
    """Record every allocation of the block with its stack.

    :param path: Path of the snapshot, without ``.pickle``; https://pytorch.org/memory_viz draws it.
    """
    memory = vendor_module().memory
    memory._record_memory_history(max_entries=EVENTS)
    try:
        yield
        memory._dump_snapshot(f"{path}.pickle")
    finally:
        memory._record_memory_history(enabled=None)


@contextmanager
def ascend_profile(path: str) -> Iterator[None]:
    """Record with Ascend's profiler, which writes ``<path>_<time>_ascend_pt`` for MindStudio Insight.

    :param path: Directory, and name of the worker.
    """
    profiler = importlib.import_module("torch_npu.profiler")
    activity = profiler.ProfilerActivity
    place = Path(path)
    write = profiler.tensorboard_trace_handler(str(place.parent), worker_name=place.name)
    with profiler.profile(activities=[activity.CPU, activity.NPU], on_trace_ready=write):
        yield
