"""Profiles of a real GPU (marker ``cuda``): kernels of torch's profiler, and the history of allocations."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from anygauge.observability.profiler import memory_profile, torch_profile

SIZE = 3 << 20

pytestmark = pytest.mark.cuda


def test_torch_records_the_kernels(tmp_path: Path) -> None:
    with torch_profile("cuda", str(tmp_path / "actor-0")):
        torch.ones(1 << 20, device="cuda").sum()
        torch.cuda.synchronize()
    (path,) = tmp_path.iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert "kernel" in {event.get("cat") for event in events}


def test_an_allocation_is_in_the_snapshot_with_its_stack(tmp_path: Path) -> None:
    with memory_profile("cuda", str(tmp_path / "actor-0")):
        torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    (path,) = tmp_path.iterdir()
    assert path.name == "actor-0.pickle"
    snapshot = pickle.loads(path.read_bytes())
    events = [event for trace in snapshot["device_traces"] for event in trace]
    (event,) = [each for each in events if (each["action"], each["size"]) == ("alloc", SIZE)]
    assert any(frame["filename"] == __file__ for frame in event["frames"])
    torch.empty(SIZE, dtype=torch.uint8, device="cuda")  # after the end: not recorded
    later = torch.cuda.memory._snapshot()["device_traces"]
    assert sum(len(trace) for trace in later) <= len(events)
