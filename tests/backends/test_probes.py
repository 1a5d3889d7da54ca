"""Probes of each backend: findings, messages and worker environments."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import anygauge.engines.megatron.plugin
import anygauge_cpu.plugin
import anygauge_cuda.env
import anygauge_cuda.plugin
import anygauge_cuda.probe
import anygauge_npu.env
import anygauge_npu.plugin
from anygauge.device import seed_everything
from anygauge.plugins import Plugins, probe_backend, select_backend
from anygauge.runtime.worker import local_accelerator_id
from anygauge_cpu.device import CpuDevice
from anygauge_cpu.plugin import fused_adamw
from anygauge_hooks.errors import BackendUnavailableError, PlacementError
from anygauge_hooks.types import Availability, BackendSpec
from anygauge_npu.releases import INSTALL

CPU, CUDA, NPU = anygauge_cpu.plugin.CPU, anygauge_cuda.plugin.CUDA, anygauge_npu.plugin.NPU
BACKENDS = {spec.name: spec for spec in (CPU, CUDA, NPU)}


@pytest.fixture
def plugins() -> Plugins:
    plugins = Plugins()
    for module in (
        anygauge.engines.megatron.plugin,
        anygauge_cpu.plugin,
        anygauge_cuda.plugin,
        anygauge_npu.plugin,
    ):
        plugins.register(module, module.__name__)
    return plugins


# -------------------------------------------------------------------------
# Selection
# -------------------------------------------------------------------------


@pytest.fixture
def bare_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what this host may have: no CUDA build, no torch-npu."""
    monkeypatch.setattr(torch.version, "cuda", None)
    hide_package(monkeypatch, "torch_npu")


def hide_package(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == hidden else find(name, *args)
    )


def test_host_without_accelerator_takes_the_cpu(plugins: Plugins, bare_host: None) -> None:
    spec, reason = select_backend(plugins)
    assert spec is CPU
    assert "cuda: torch" in reason
    assert "built without CUDA" in reason
    assert "npu: torch-npu is not installed" in reason
    device = plugins.make_device(spec, 0)
    assert (device.type, device.torch_device) == ("cpu", torch.device("cpu"))


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_backend_that_was_asked_for_never_falls_back(name: str, plugins: Plugins, bare_host: None) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        select_backend(plugins, name)
    assert caught.value.hint


def test_only_usable_accelerator_is_taken(
    plugins: Plugins, bare_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for part in ("_no_driver", "_no_cuda", "_no_device"):
        monkeypatch.setattr(anygauge_cuda.probe, part, lambda given: None)
    monkeypatch.setattr(
        anygauge_cuda.probe, "_devices", lambda torch: Availability(ok=True, reason="2 x GPU")
    )
    spec, reason = select_backend(plugins)
    assert spec is CUDA
    assert "only accelerator" in reason


@pytest.mark.parametrize("spec", BACKENDS.values(), ids=BACKENDS.keys())
def test_backend_ignores_another_ones_questions(spec: BackendSpec, plugins: Plugins) -> None:
    stranger = BackendSpec(**{field: getattr(spec, field) for field in spec.__slots__} | {"name": "other"})
    assert plugins.first("make_device", backend=stranger, index=0) is None
    assert plugins.first("make_jit_fuser", backend=stranger) is None
    assert plugins.collect("register_kernels", backend=stranger) == []
    assert plugins.collect("adjust_config", config=None, backend=stranger) == []


@pytest.mark.parametrize(("spec", "dtype"), [(CPU, "float32"), (CUDA, "bfloat16"), (NPU, "bfloat16")])
def test_backend_chooses_the_precision(spec: BackendSpec, dtype: str, plugins: Plugins) -> None:
    (change,) = plugins.collect("adjust_config", config=None, backend=spec)
    assert (change.path, change.value) == ("train.dtype", dtype)
    assert change.reason


@pytest.mark.parametrize("spec", [CPU, CUDA])
def test_missing_torch_is_named(spec: BackendSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_package(monkeypatch, "torch")
    state = probe_backend(spec)
    assert (state.ok, state.reason) == (False, "torch is not installed")
    assert "pip install" in str(state.hint)


# -------------------------------------------------------------------------
# The NPU's probe
# -------------------------------------------------------------------------


@pytest.fixture
def fake_npu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulate an installed torch-npu of a version, CANN, and what importing torch-npu does."""

    def install(
        *,
        versions: Mapping[str, str] | None = None,
        cann: bool = True,
        error: Exception | None = None,
        count: int = 0,
    ) -> None:
        def library(name: str) -> None:
            if not cann:
                raise OSError(f"{name}: cannot open shared object file: No such file or directory")

        monkeypatch.setattr(ctypes, "CDLL", library)
        found = versions or {"torch": "2.13.0+cpu", "torch-npu": "2.13.0"}
        requires = {"torch-npu": ["torch==2.10.0"]} if found["torch-npu"] == "2.10.0" else {}
        monkeypatch.setattr(
            anygauge_npu.probe,
            "distribution",
            lambda name: SimpleNamespace(name=name, version=found[name], requires=requires.get(name)),
        )
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        module = ModuleType("torch_npu")
        vars(module)["npu"] = SimpleNamespace(
            device_count=lambda: count, get_device_name=lambda index: "Ascend"
        )

        def load(name: str) -> ModuleType:
            if error is not None:
                os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
                    "0"  # which the real one takes back once it is loaded
                )
                raise error
            return module

        monkeypatch.setattr(importlib, "import_module", load)
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)

    return install


def test_npu_reports_its_devices(fake_npu: Callable[..., None]) -> None:
    fake_npu(count=8)
    state = probe_backend(NPU)
    assert (state.ok, state.reason) == (True, "8 x Ascend")


def test_npu_without_a_device(fake_npu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npu()
    state = probe_backend(NPU)
    assert (state.ok, state.reason) == (False, "CANN finds no NPU")
    assert "npu-smi info" in str(state.hint)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    assert "ASCEND_RT_VISIBLE_DEVICES='' hides" in probe_backend(NPU).reason


def test_npu_without_cann(fake_npu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npu(cann=False)
    state = probe_backend(NPU)
    missing = "libascendcl.so: cannot open shared object file: No such file or directory"
    assert (state.ok, state.reason) == (False, f"CANN is missing or too old ({missing})")
    assert "set_env.sh" in str(state.hint)


def test_npu_with_an_older_cann(fake_npu: Callable[..., None]) -> None:
    cause = ImportError("libtorch_npu.so: undefined symbol: aclrtSomethingNew")
    error = RuntimeError("Failed to load the backend extension: torch_npu")
    error.__cause__ = cause
    for raised in (cause, error):
        fake_npu(error=raised)
        state = probe_backend(NPU)
        assert state.reason == f"CANN is missing or too old ({cause})"
        assert "set_env.sh" in str(state.hint)


@pytest.mark.parametrize("before", [None, "1"])
def test_a_probe_leaves_no_trace_in_the_environment(
    before: str | None, fake_npu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    for error in (None, ImportError("no")):
        fake_npu(error=error)
        probe_backend(NPU)
        assert os.environ.get(name) == before


def test_npu_that_does_not_load_for_another_reason(fake_npu: Callable[..., None]) -> None:
    fake_npu(error=RuntimeError("Two accelerators cannot be used at the same time"))
    state = probe_backend(NPU)
    assert not state.ok
    assert "does not load (Two accelerators" in state.reason


@pytest.mark.parametrize(("installed", "torch_npu"), [("2.13.0+cpu", "2.10.0.post4"), ("2.10.1", "2.10.0")])
def test_npu_built_for_another_torch(installed: str, torch_npu: str, fake_npu: Callable[..., None]) -> None:
    fake_npu(versions={"torch": installed, "torch-npu": torch_npu}, count=8)
    state = probe_backend(NPU)
    assert (state.ok, state.reason) == (False, f"torch-npu {torch_npu} does not fit torch {installed}")
    assert state.hint == INSTALL


def test_npu_without_torch_npu_names_the_pair_that_has_a_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    state = probe_backend(NPU)
    assert (state.ok, state.reason) == (False, "torch-npu is not installed")
    assert state.hint == INSTALL


def test_npu_without_metadata(fake_npu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    fake_npu()
    monkeypatch.setattr(anygauge_npu.probe, "distribution", missing)
    assert probe_backend(NPU).reason == "torch is not installed"


def test_npu_workers_load_the_vendor_library(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(anygauge_npu.env.importlib, "import_module", loaded.append)
    plugins.prepare_worker(CPU, "actor", "before_vendor_import")
    plugins.prepare_worker(NPU, "actor", "after_config")
    assert loaded == []
    plugins.prepare_worker(NPU, "actor", "before_vendor_import")
    assert loaded == ["torch_npu"]


# -------------------------------------------------------------------------
# Worker processes
# -------------------------------------------------------------------------


def worker_env(
    plugins: Plugins, backend: BackendSpec, *, role: str = "actor", deterministic: bool = False
) -> Mapping[str, str]:
    return plugins.worker_env(
        backend,
        role=role,
        deterministic=deterministic,
        interface=None,
        ip_version="any",
        timeout_s=1800.0,
    )


def test_cpu_workers_see_no_accelerator(plugins: Plugins) -> None:
    environ = worker_env(plugins, CPU)
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    assert environ["ASCEND_RT_VISIBLE_DEVICES"] == ""
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_cpu_workers_see_none_without_the_other_plugins() -> None:
    plugins = Plugins()
    plugins.register(anygauge.engines.megatron.plugin, "megatron")
    plugins.register(anygauge_cpu.plugin, "cpu")
    environ = worker_env(plugins, CPU)
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["ASCEND_RT_VISIBLE_DEVICES"]) == ("", "")


def test_accelerator_workers_see_only_their_own_kind(plugins: Plugins) -> None:
    cuda = worker_env(plugins, CUDA)
    assert "CUDA_VISIBLE_DEVICES" not in cuda
    assert cuda["ASCEND_RT_VISIBLE_DEVICES"] == ""
    npu = worker_env(plugins, NPU)
    assert "ASCEND_RT_VISIBLE_DEVICES" not in npu
    assert npu["CUDA_VISIBLE_DEVICES"] == ""


def test_a_deterministic_run_adds_what_its_backend_needs(plugins: Plugins) -> None:
    added = {
        spec.name: worker_env(plugins, spec, deterministic=True).items() - worker_env(plugins, spec).items()
        for spec in (CPU, CUDA, NPU)
    }
    assert added["cpu"] == set()
    assert added["cuda"] == {
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("NCCL_ALGO", "Ring"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
    }
    assert added["npu"] == {
        ("HCCL_DETERMINISTIC", "true"),
        ("LCCL_DETERMINISTIC", "1"),
        ("CLOSE_MATMUL_K_SHIFT", "1"),
        ("ATB_MATMUL_SHUFFLE_K_ENABLE", "0"),
        ("ATB_LLM_LCOC_ENABLE", "0"),
    }


def test_npu_workers_agree_on_ports_buffers_and_limits(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("HCCL_BUFFSIZE", "HCCL_EXEC_TIMEOUT", "PYTORCH_NPU_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    trainer, server = (worker_env(plugins, NPU, role=role) for role in ("actor", "sglang"))
    assert server["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"
    assert trainer.items() - server.items() == {("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")}
    assert server.items() - trainer.items() == {("SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT", "1")}
    assert (server["HCCL_HOST_SOCKET_PORT_RANGE"], server["HCCL_NPU_SOCKET_PORT_RANGE"]) == ("auto", "auto")
    assert server["HCCL_BUFFSIZE"] == "200"
    for name, value in zip(names, ("64", "60", "max_split_size_mb:512"), strict=True):
        monkeypatch.setenv(name, value)
    assert [worker_env(plugins, NPU)[name] for name in names] == ["64", "60", "max_split_size_mb:512"]


@pytest.mark.parametrize(
    ("timeout_s", "connects", "executes", "event"),
    [(1800.0, "1800", "1800", "1832"), (0.5, "120", "1", "33"), (90_000, "7200", "90000", "90032")],
)
def test_hccl_waits_no_longer_than_a_run(timeout_s: float, connects: str, executes: str, event: str) -> None:
    assert anygauge_npu.env.timeouts(timeout_s) == {
        "HCCL_CONNECT_TIMEOUT": connects,
        "HCCL_EXEC_TIMEOUT": executes,
        "HCCL_EVENT_TIMEOUT": event,
    }


@pytest.mark.parametrize(
    ("spec", "ids", "environ", "index"),
    [
        (CPU, ["3"], {}, 0),
        (NPU, ["5"], {}, 5),
        (NPU, ["5"], {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, 1),
    ],
)
def test_local_device(spec: BackendSpec, ids: list[str], environ: Mapping[str, str], index: int) -> None:
    assert spec.local_device(ids, environ) == index


@pytest.mark.parametrize(
    ("spec", "ids", "environ"),
    [
        (NPU, ["3"], {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}),
        (NPU, ["3"], {"ASCEND_RT_VISIBLE_DEVICES": "0,x,3"}),
        (NPU, ["0-1"], {"ASCEND_RT_VISIBLE_DEVICES": "0-1"}),
        (NPU, ["0-1"], {}),
    ],
)
def test_device_that_is_not_visible(spec: BackendSpec, ids: list[str], environ: Mapping[str, str]) -> None:
    with pytest.raises(PlacementError, match="VISIBLE_DEVICES") as caught:
        spec.local_device(ids, environ)
    assert caught.value.hint


LISTS = [
    (CUDA, "0,-1", ["0"]),
    (CUDA, "0,-1,2", ["0"]),
    (CUDA, "all", []),
    (CUDA, "0-1", []),
    (CUDA, "none", []),
    (CUDA, "", []),
    (CUDA, " 3, 1,", ["3", "1"]),
    (CUDA, "0,,1", ["0"]),
    (CUDA, "GPU-74c1,MIG-8f3a-1,1", ["GPU-74c1", "MIG-8f3a-1", "1"]),
    (NPU, "0-1", []),
    (NPU, "all", []),
    (NPU, "1,2,-1,3", ["1", "2"]),
    (NPU, "01, 2", ["1", "2"]),
]


@pytest.mark.parametrize(("spec", "text", "ids"), LISTS)
def test_workers_are_given_what_they_will_find(spec: BackendSpec, text: str, ids: list[str]) -> None:
    """The launcher reads a list of visible devices as the worker does."""
    name = spec.visible_devices_env
    assert name is not None
    for index, each in enumerate(ids):
        assert local_accelerator_id(spec, index, {name: text}) == each
        assert spec.local_device([each], {name: text}) == index
    with pytest.raises(PlacementError, match=rf"no device {len(ids)} .*{name}=.* shows {len(ids)}\."):
        local_accelerator_id(spec, len(ids), {name: text})


def test_more_workers_than_devices(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing limits what a process sees, so that the vendor's library would be asked."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(
        sys.modules, "torch_npu", SimpleNamespace(npu=SimpleNamespace(device_count=lambda: 1))
    )
    for spec, kind in ((anygauge_cuda.plugin.CUDA, "GPU"), (anygauge_npu.plugin.NPU, "NPU")):
        assert spec.visible_devices_env is not None
        monkeypatch.delenv(spec.visible_devices_env, raising=False)
        with pytest.raises(
            PlacementError, match=rf"{kind} 1 \(counted from 0\).* sees 1: \w+ is None"
        ) as error:
            plugins.make_device(spec, 1)
        assert "placement.train_workers" in str(error.value.hint)


@pytest.mark.parametrize("spec", [CUDA, NPU])
def test_worker_without_a_device(spec: BackendSpec) -> None:
    with pytest.raises(PlacementError, match="assigned no"):
        spec.local_device([], {})


# -------------------------------------------------------------------------
# The host as a device
# -------------------------------------------------------------------------


def test_host_device_reports_memory() -> None:
    memory = CpuDevice().memory()
    assert 0 < memory["allocated"] < memory["total"]
    assert 0 < memory["free"] < memory["total"]


def test_host_random_state_round_trip() -> None:
    device = CpuDevice()
    seed_everything(device, 7)
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    seed_everything(device, 7)
    assert torch.equal(first, torch.rand(3))


def test_host_has_nothing_to_wait_for() -> None:
    device = CpuDevice()
    before = torch.get_rng_state()
    device.synchronize()
    device.empty_cache()
    assert torch.equal(before, torch.get_rng_state())


def test_seeding_reaches_python_and_numpy() -> None:
    import random

    import numpy as np

    seed_everything(CpuDevice(), 2**40 + 1)
    first = random.random(), np.random.random()
    seed_everything(CpuDevice(), 2**40 + 1)
    assert first == (random.random(), np.random.random())


@pytest.mark.parametrize("spec", [CPU, NPU])
def test_fused_optimizer_equals_torchs(spec: BackendSpec, plugins: Plugins) -> None:
    """On host tensors: what differs is the kernel that the device's tensors lead to."""
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2)]
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    fused = plugins.first("make_optimizer", backend=spec, param_groups=[{"params": [weights[0]]}], **settings)
    plain = torch.optim.AdamW([weights[1]], **settings)
    for _ in range(3):
        for weight, optimizer in zip(weights, (fused, plain), strict=True):
            weight.grad = weight.detach() ** 3
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1])
    assert set(fused.state[weights[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert fused.state[weights[0]]["step"].item() == 3


def test_host_optimizer_keeps_the_options_of_a_group() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [weight], "weight_decay": 0.5}]
    optimizer = fused_adamw(groups, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
