"""Each worker sees its own devices alone, from before its device object is made to its end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.plugins import Plugins, load_plugins
from anygauge.runtime import worker
from anygauge.runtime.worker import Worker, WorkerSetup
from anygauge.serving.engines import SERVER
from anygauge_cpu.device import CpuDevice
from anygauge_cuda.plugin import CUDA
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import PlacementError
from anygauge_hooks.types import BackendSpec
from anygauge_npu.plugin import NPU

ENGINE = "idle"


class ListedDevice(CpuDevice):
    """The host in place of one device of the visible list, which is read at each call, as torch reads it."""

    def __init__(self, spec: BackendSpec, index: int) -> None:
        super().__init__()
        self.spec, self.index = spec, index
        self.name = self._listed()

    def _listed(self) -> str:
        assert self.spec.visible_devices_env is not None
        visible = os.environ[self.spec.visible_devices_env].split(",")
        assert self.index < len(visible), "Invalid device id"
        return visible[self.index]

    def meters(self) -> Mapping[str, float]:
        assert self._listed() == self.name, "the devices were numbered anew"
        return {"utilization": 1.0}


class Idle:
    """A server that is never started."""

    def close(self) -> None:
        return


class IdleEngine:
    @hookimpl
    def register_rollout_engines(self) -> Iterable[RolloutEngineSpec]:
        return [RolloutEngineSpec(name=ENGINE, serve=lambda config, context: Idle())]  # type: ignore[arg-type,return-value]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Let a worker be made here, and collect the devices it sees before a vendor's library is imported."""
    seen: list[str | None] = []

    def loaded() -> Plugins:
        plugins = load_plugins()
        plugins.register(IdleEngine(), ENGINE)
        return plugins

    def prepare(plugins: Plugins, spec: BackendSpec, role: str, phase: str, **_: Any) -> None:
        if phase == "before_vendor_import":
            seen.append(os.environ.get(spec.visible_devices_env or ""))

    monkeypatch.setattr(worker, "load_plugins", loaded)
    monkeypatch.setattr(Plugins, "prepare_worker", prepare)
    monkeypatch.setattr(Plugins, "make_device", lambda plugins, spec, index: ListedDevice(spec, index))
    monkeypatch.setattr(worker, "log_worker", lambda role, rank: None)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return seen


def started(
    spec: BackendSpec,
    *,
    rank: int = 0,
    worker_class: str = SERVER,
    accelerators: Sequence[str] | None = None,
    first_device: int = 1,
    devices: int = 1,
) -> Worker:
    """Return the worker of a rank that was started beside one training worker."""
    config = Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "."},
            "data": {"train": ["t.jsonl"]},
            "rollout": {"engine": ENGINE},
            "placement": {"rollout_workers": 2},
        }
    )
    setup = WorkerSetup(
        config=config,
        backend=spec.name,
        worker_class=worker_class,
        role="rollout",
        rank=rank,
        world_size=2,
        log="",
        timeout_s=1.0,
        first_device=first_device,
        devices=devices,
        accelerators=accelerators,
    )
    made = Worker(setup)
    made.start(workers_on_host=1, rendezvous=None)
    made.connect(rendezvous=None, port=None)
    return made


def device_of(made: Worker) -> Any:
    return made._device


@pytest.mark.parametrize("spec", [CUDA, NPU], ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("visible", "rank", "own"), [(None, 0, "1"), (None, 1, "2"), ("4,6,7", 1, "7")], ids=str
)
def test_a_server_worker_reports_on_its_own_device(
    spec: BackendSpec,
    visible: str | None,
    rank: int,
    own: str,
    prepared: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = str(spec.visible_devices_env)
    monkeypatch.setenv(name, visible or "")
    if visible is None:
        monkeypatch.delenv(name)
    made = started(spec, rank=rank)
    assert prepared == [own], "hidden before a vendor's library is imported"
    assert (device_of(made).index, device_of(made).name) == (0, own)
    assert made._object.report()["memory"]["utilization"] == 1.0
    assert made._context().accelerators == (own,)
    assert os.environ[name] == own


@pytest.mark.parametrize("spec", [CUDA, NPU], ids=lambda spec: spec.name)
def test_a_server_of_several_devices_sees_all_of_them(
    spec: BackendSpec, prepared: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(str(spec.visible_devices_env), "0,1,2,3,4")
    made = started(spec, rank=1, devices=2)
    assert prepared == ["3,4"]
    assert made._context().accelerators == ("3", "4")


@pytest.mark.parametrize("spec", [CUDA, NPU], ids=lambda spec: spec.name)
def test_a_worker_on_devices_of_others_sees_what_was_hidden_from_it(
    spec: BackendSpec, prepared: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(str(spec.visible_devices_env), "")
    made = started(spec, accelerators=("5", "7"))
    assert prepared == ["5,7"]
    assert (device_of(made).index, device_of(made).name) == (0, "5")


@pytest.mark.parametrize("spec", [CUDA, NPU], ids=lambda spec: spec.name)
def test_a_device_that_the_launcher_gave_but_hid_is_refused(
    spec: BackendSpec, prepared: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's list of devices is another one than the run's."""
    monkeypatch.setenv(str(spec.visible_devices_env), "0,1")
    monkeypatch.setattr(Worker, "accelerator_ids", lambda self: ["3"])
    with pytest.raises(PlacementError, match="3 is not visible here"):
        started(spec)
    assert prepared == []
