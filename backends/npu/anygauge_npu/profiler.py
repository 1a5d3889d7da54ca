"""Ascend's own profiler."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ascend_profile"]


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
