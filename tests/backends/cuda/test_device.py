"""The parts of the GPU's device object that need no GPU: allocator, meters, near cores, options, files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge_cuda import allocator, comm, diagnosis, numa, nvml
from anygauge_cuda.nvml import Meters
from anygauge_cuda.plugin import prepare_worker
from anygauge_hooks.errors import ConfigError

ALLOC = "PYTORCH_CUDA_ALLOC_CONF"


class NvmlError(Exception):
    pass


# -------------------------------------------------------------------------
# The allocator
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (None, []),
        ("expandable_segments:False", []),
        (
            "expandable_segments:True,max_split_size_mb:64",
            [
                "expandable_segments:True,max_split_size_mb:64,expandable_segments:False",
                "expandable_segments:True,max_split_size_mb:64",
            ],
        ),
    ],
)
def test_memory_that_is_shared_does_not_expand(
    given: str | None, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(allocator, "_setter", lambda: seen.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv(ALLOC, raising=False)
    if given is not None:
        monkeypatch.setenv(ALLOC, given)
    with allocator.shareable():
        assert seen == chosen[:1]
    assert seen == chosen


def test_torch_has_a_function_that_changes_the_allocator() -> None:
    allocator._setter()("expandable_segments:False")


# -------------------------------------------------------------------------
# Meters
# -------------------------------------------------------------------------


class FakeNvml:
    """Meters of one GPU, which a test turns."""

    NVMLError = NvmlError

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> Any:
            found = self.values.get(name)
            if found is None:
                raise NvmlError(name)
            return found(*arguments) if callable(found) else found

        return answer


def sample(at: int, percent: int) -> Any:
    return SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=percent))


def test_meters_tell_means_since_the_last_reading() -> None:
    seconds, energy_mj, slowed_ns = [10.0], [5_000_000], [0]
    samples = [sample(1, 100), sample(2, 50)]
    fake = FakeNvml(
        nvmlDeviceGetSamples=lambda gpu, kind, since: (0, samples),
        nvmlDeviceGetTemperature=61,
        nvmlDeviceGetClockInfo=1980,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: energy_mj[0],
        nvmlDeviceGetViolationStatus=lambda gpu, policy: SimpleNamespace(
            violationTime=slowed_ns[0] * (policy == 1)
        ),
    )
    meters = Meters(fake, object(), clock=lambda: seconds[0])
    assert meters.read() == {"utilization": 0.75, "temperature": 61.0, "clock": 1980.0}
    samples.append(sample(3, 10))
    seconds[0], energy_mj[0], slowed_ns[0] = 14.0, 5_000_000 + 2_000_000, 10**9
    assert meters.read() == {
        **{"utilization": 0.1, "temperature": 61.0, "clock": 1980.0},
        **{"power": 500.0, "power_capped": 0.0, "thermal_slowed": 0.25},
    }
    seconds[0], slowed_ns[0] = 14.5, 2 * 10**9
    found = meters.read()
    assert "utilization" not in found, "no sample since"
    assert found["thermal_slowed"] == 1.0, "the driver counts in steps"


def test_meters_that_are_not_there_are_left_out() -> None:
    fake = FakeNvml(nvmlDeviceGetTemperature=40)
    assert Meters(fake, object()).read() == {"temperature": 40.0}


@pytest.mark.parametrize("known", ["GPU-8932", "MIG-8932", None])
def test_a_gpu_is_found_by_its_id(known: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(uuid: str) -> str:
        if uuid != known:
            raise NvmlError(uuid)
        return uuid

    fake = FakeNvml(nvmlDeviceGetHandleByUUID=find, nvmlInit=lambda: 1)
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    assert nvml.find_gpu("8932") == (None if known is None else (fake, known))


def test_without_nvml_there_are_no_meters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.find_gpu("8932") is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    assert nvml.find_gpu("8932") is None, "no driver"


# -------------------------------------------------------------------------
# Near cores
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,8\n", {0, 1, 2, 8}), ("5", {5}), ("\n", set()), (None, set())]
)
def test_near_cores_are_those_that_the_kernel_lists(
    text: str | None, cores: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNvml(nvmlDeviceGetPciInfo=SimpleNamespace(busId="00000000:1A:00.0"))
    monkeypatch.setattr(numa, "find_gpu", lambda uuid: (fake, object()))
    if text is not None:
        (tmp_path / "0000:1a:00.0").mkdir()
        (tmp_path / "0000:1a:00.0/local_cpulist").write_text(text)
    assert numa.near_cores("8932", tmp_path) == cores


@pytest.mark.parametrize(
    ("near", "environ", "bound"),
    [
        ({1, 2, 9}, {}, {1, 2}),
        ({0, 1, 2, 3}, {}, None),
        ({9}, {}, None),
        (set(), {}, None),
        ({1}, {"ANYGAUGE_CUDA_BIND": "0"}, None),
    ],
)
def test_a_trainer_keeps_to_those_of_its_cores_that_are_near(
    near: set[int], environ: Mapping[str, str], bound: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, set[int]] = {}
    monkeypatch.setattr(numa, "near_cores", lambda uuid: near)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="8932"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", seen.__setitem__)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("ANYGAUGE_CUDA_BIND", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    numa.bind_to_device()
    assert set(map(frozenset, seen.values())) == ({frozenset(bound)} if bound else set())
    assert threads == ([len(bound)] if bound else []), "no more threads than cores"
    if bound:
        assert os.getpid() in seen, "of every thread that there is"


# -------------------------------------------------------------------------
# Workers
# -------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "is_bound"), [("actor", True), ("rollout", False), ("sglang", False)])
def test_a_worker_is_prepared_once_its_config_is_known(
    role: str, is_bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    monkeypatch.setattr(numa, "bind_to_device", lambda: bound.append(role))
    monkeypatch.delenv(diagnosis.DUMP, raising=False)
    monkeypatch.delenv(diagnosis.HISTORY, raising=False)
    log = str(tmp_path / "actor-0.log")
    prepare_worker(role, "before_vendor_import", object(), log)
    prepare_worker(role, "after_config", None, log)
    assert (bound, diagnosis.DUMP in os.environ) == ([], False)
    prepare_worker(role, "after_config", object(), log)
    assert os.environ[diagnosis.DUMP] == str(tmp_path / "actor-0.collectives-")
    assert bound == ([role] if is_bound else [])
    monkeypatch.delenv(diagnosis.DUMP)


def test_a_lack_of_memory_writes_down_what_was_asked_to_be_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observers: list[Any] = []
    recorded: list[int] = []
    memory: Any = torch.cuda.memory
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda **given: recorded.append(given["max_entries"])
    )
    monkeypatch.setattr(memory, "_dump_snapshot", lambda file: Path(file).write_text("x"))
    attach = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, attach, observers.append, raising=False)
    monkeypatch.setenv(diagnosis.DUMP, "mine-")
    monkeypatch.setenv(diagnosis.HISTORY, "1000")
    diagnosis.write_diagnosis(str(tmp_path / "actor-0.log"))
    assert (recorded, os.environ[diagnosis.DUMP]) == ([1000], "mine-")
    observers[0](0, 1, 2, 3)
    assert (tmp_path / "actor-0.memory.pickle").exists()
    monkeypatch.setenv(diagnosis.HISTORY, "many")
    with pytest.raises(ConfigError, match="is 'many', not a number"):
        diagnosis.write_diagnosis(str(tmp_path / "actor-0.log"))


# -------------------------------------------------------------------------
# Groups
# -------------------------------------------------------------------------


def test_options_of_a_group_have_the_limit_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None)))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", made, raising=False)
    assert comm.group_options("default", 90.0)._timeout == timedelta(seconds=90)
    assert comm.group_options("default", 90.0).config.max_ctas == comm.FEW_BLOCKS
    assert comm.group_options("other", 90.0).config.max_ctas is None
