"""The order in which a worker process comes up."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anygauge.config.schema import Config
from anygauge.device import LateDevice
from anygauge.runtime.worker import Worker, WorkerSetup
from anygauge_hooks.types import BackendSpec

TREE = {"run": {"name": "w"}, "model": {"path": "."}, "data": {"train": []}, "reward": {"function": "f"}}


class _Device:
    torch_device = "chip:0"

    def peak_memory(self, *, reset: bool = False) -> None:
        """Tell nothing."""


@pytest.mark.parametrize(
    ("computes", "started", "connected"),
    [(True, ["device", "preload"], ["object"]), (False, [], ["object", "device"])],
    ids=["trains", "looks after a server"],
)
def test_only_a_worker_that_computes_waits_for_its_device(
    monkeypatch: pytest.MonkeyPatch, computes: bool, started: list[str], connected: list[str]
) -> None:
    """A server begins before the process that looks after it imports torch."""
    events: list[str] = []

    class Object:
        @staticmethod
        def preload(*arguments: Any) -> None:
            events.append("preload")

        def __init__(self, *arguments: Any) -> None:
            events.append("object")

    def make_device(*_: object) -> _Device:
        events.append("device")
        return _Device()

    module = ModuleType("module_of_the_worker")
    module.Object = Object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    backend = BackendSpec(
        name="chip",
        device_type="chip",
        dist_backend="gloo",
        probe=SimpleNamespace,  # type: ignore[arg-type]
        scheduler_resource="chip",
        local_device=lambda ids, environ: 0,
    )
    plugins = SimpleNamespace(
        installed=[],
        named=lambda hook: {"chip": backend},
        make_device=make_device,
        prepare_worker=lambda *_, **__: None,
    )
    monkeypatch.setattr("anygauge.runtime.worker.load_plugins", lambda: plugins)
    monkeypatch.setattr("anygauge.runtime.worker.log_worker", lambda *_: None)
    setup = WorkerSetup(
        config=Config.model_validate(TREE),
        backend="chip",
        worker_class="module_of_the_worker:Object",
        role="rollout",
        rank=0,
        world_size=1,
        log="",
        timeout_s=1.0,
        computes=computes,
    )
    worker = Worker(setup)
    worker.start(workers_on_host=1, rendezvous=None)
    assert events == started
    worker.connect(rendezvous=None, port=None)
    assert events == [*started, *connected]


def test_a_late_device_is_made_once() -> None:
    made: list[_Device] = []

    def make() -> Any:
        made.append(_Device())
        return made[-1]

    device = LateDevice(make)
    assert made == []
    assert device.torch_device == "chip:0"
    assert device.peak_memory() is None
    assert len(made) == 1
