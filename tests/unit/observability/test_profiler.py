"""Profiles of one worker: torch's trace with the phases in it, and profilers that fail."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.device import memory_phase
from anygauge.observability.phases import Row
from anygauge.observability.profiler import WorkerProfiler
from anygauge.plugins import load_plugins
from anygauge_cpu.device import CpuDevice
from anygauge_cpu.plugin import CPU
from anygauge_hooks import hookimpl
from anygauge_hooks.types import BackendSpec


class Profilers:
    """A plugin with a profiler that fails at the one or the other end."""

    @hookimpl
    def make_profiler(self, kind: str, path: str) -> Any:
        return self.failing(kind, path) if kind in ("begin", "end") else None

    @contextmanager
    def failing(self, kind: str, path: str) -> Iterator[None]:
        if kind == "begin":
            raise OSError(f"no {path}")
        yield
        raise ValueError("nothing was recorded")


def worker(rank: int = 1, backend: BackendSpec = CPU) -> WorkerProfiler:
    plugins = load_plugins(only=["cpu"])
    plugins.register(Profilers(), "profilers")
    context: Any = SimpleNamespace(backend=backend, plugins=plugins)
    return WorkerProfiler(context, Row("actor", rank))


def test_a_trace_of_torch_has_the_phases_and_their_operators(tmp_path: Path) -> None:
    profiler = worker()
    for _ in range(2):  # one after the other
        assert profiler.start("torch", str(tmp_path), ()) is None
        with memory_phase(CpuDevice(), "optimizer"):
            torch.ones(8).softmax(0)
        assert profiler.stop() is None
    (path,) = tmp_path.iterdir()
    assert path.name == "actor-1.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    (phase,) = [each for each in events if each["name"] == "optimizer"]
    (operator,) = [each for each in events if each["name"] == "aten::softmax"]
    assert phase["cat"] == "user_annotation"
    assert phase["ts"] <= operator["ts"] <= operator["ts"] + operator["dur"] <= phase["ts"] + phase["dur"]


def test_a_rank_that_is_not_chosen_records_nothing(tmp_path: Path) -> None:
    profiler = worker(rank=1)
    assert profiler.start("torch", str(tmp_path), (0, 2)) is None
    assert profiler.stop() is None
    assert not [*tmp_path.iterdir()]


def test_what_fails_is_told_and_ends_nothing(tmp_path: Path) -> None:
    profiler = worker()
    told = f"actor-1: the profile did not start: OSError('no {tmp_path / 'actor-1'}')"
    assert profiler.start("begin", str(tmp_path), ()) == told
    assert profiler.stop() is None
    assert profiler.start("end", str(tmp_path), ()) is None
    assert profiler.stop() == "actor-1: the profile did not end: ValueError('nothing was recorded')"
    assert profiler.stop() is None
    told = "no plugin makes a profiler of kind 'vendor' for backend cpu"
    assert told in str(profiler.start("vendor", str(tmp_path), ()))


class History:
    """Stands for the memory module of an accelerator."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def _record_memory_history(self, enabled: object = "all", max_entries: int = 0) -> None:
        self.calls.append(enabled)

    def _dump_snapshot(self, path: str) -> None:
        self.calls.append(path)


def test_a_history_of_allocations_is_written_for_backends_that_name_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    history = History()
    monkeypatch.setattr(torch, "get_device_module", {"cpu": SimpleNamespace(memory=history)}.get)
    profiler = worker(backend=replace(CPU, profile_kinds=("memory",)))
    assert profiler.start("memory", str(tmp_path), ()) is None
    assert profiler.stop() is None
    assert history.calls == ["all", str(tmp_path / "actor-1.pickle"), None]
    assert "no plugin makes a profiler of kind 'memory'" in (
        worker().start("memory", str(tmp_path), ()) or ""
    )
