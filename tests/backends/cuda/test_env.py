"""Environment of CUDA workers, and the GPU that each uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.plugins import Plugins, load_plugins
from anygauge_cuda import diagnosis, env
from anygauge_cuda.plugin import CUDA, check_config
from anygauge_hooks.errors import PlacementError

ALLOC = "PYTORCH_CUDA_ALLOC_CONF"
OTHER_ALLOC = "PYTORCH_ALLOC_CONF"
EXPAND = "expandable_segments:True"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(only=["cpu", "cuda", "npu"])


@pytest.fixture(autouse=True)
def _bare_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(env.FORWARDED) or name in {*env.WORKER, *env.ALLOCATOR_NAMES}:
            monkeypatch.delenv(name)


def environment(plugins: Plugins, role: str = "actor", **other: Any) -> Mapping[str, str]:
    asked = {"deterministic": False, "interface": None, "ip_version": "any", "timeout_s": 60.0, **other}
    found = plugins.worker_env(CUDA, role=role, **asked)
    return {name: value for name, value in found.items() if not name.startswith(("ASCEND", "TORCH_DEVICE"))}


# -------------------------------------------------------------------------
# Variables
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "users", "expected"),
    [("megatron", None, "1"), ("megatron", "8", "8"), ("fsdp", None, None), ("fsdp", "1", "1")],
)
def test_kernels_are_ordered_for_megatron_alone(
    engine: str, users: str | None, expected: str | None, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One queue would have the gathers of FSDP wait for the layers beside which they run."""
    monkeypatch.delenv(env.CONNECTIONS, raising=False)
    if users:
        monkeypatch.setenv(env.CONNECTIONS, users)
    assert environment(plugins, train_engine=engine).get(env.CONNECTIONS) == expected


def test_trainers_and_servers_differ_in_the_allocator_alone(plugins: Plugins) -> None:
    trainer, server = environment(plugins), environment(plugins, "sglang")
    assert server == env.WORKER
    assert trainer == {**env.WORKER, ALLOC: EXPAND}
    assert server["NCCL_CUMEM_ENABLE"] == "0"
    assert (server["NCCL_NVLS_ENABLE"], server["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
    assert environment(plugins, "rollout") == server, "a server has the environment of its owner too"


def test_what_the_user_set_wins_at_both_ends(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "NCCL_NVLS_ENABLE": "1",
        "NCCL_CUMEM_ENABLE": "1",
        "NCCL_IB_HCA": "mlx5",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_FR_BUFFER_SIZE": "0",
        "TORCH_SYMM_MEM_ALLOCATOR": "NVSHMEM",
        "ANYGAUGE_CUDA_BIND": "0",
        "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "8",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    for role in ("actor", "sglang"):
        assert environment(plugins, role).items() >= own.items()


def test_what_the_user_set_by_an_older_name_wins(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch reads it only where the newer name is not set."""
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "20000")
    found = environment(plugins)
    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "20000"
    assert "TORCH_FR_BUFFER_SIZE" not in found
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace-"))
    diagnosis.write_diagnosis(str(tmp_path / "actor-0.log"))
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ


def test_the_config_counts_more_than_the_shell(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert environment(plugins)["NCCL_SOCKET_IFNAME"] == "eth0"
    found = environment(plugins, interface="ib0", ip_version="6", deterministic=True)
    assert (found["NCCL_SOCKET_IFNAME"], found["NCCL_SOCKET_FAMILY"]) == ("=ib0", "AF_INET6")
    assert found["NCCL_ALGO"] == "Ring"


@pytest.mark.parametrize(
    ("given", "trainer", "server"),
    [
        ({ALLOC: "max_split_size_mb:512"}, "max_split_size_mb:512", "max_split_size_mb:512"),
        ({ALLOC: EXPAND}, EXPAND, ""),
        ({ALLOC: f"{EXPAND},max_split_size_mb:512"}, None, "max_split_size_mb:512"),
        ({ALLOC: "a:1, expandable_segments : true "}, None, "a:1"),
        ({ALLOC: "expandable_segments:False"}, None, "expandable_segments:False"),
        ({ALLOC: ""}, "", ""),
    ],
)
def test_a_server_never_expands_segments(
    given: Mapping[str, str],
    trainer: str | None,
    server: str,
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory saver refuses to start beside them, and what the shell has reaches it by inheritance."""
    monkeypatch.setenv(ALLOC, given[ALLOC])
    assert environment(plugins)[ALLOC] == (given[ALLOC] if trainer is None else trainer)
    assert environment(plugins, "sglang")[ALLOC] == server


def test_torchs_newer_name_for_the_allocator_is_a_choice_too(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OTHER_ALLOC, EXPAND)
    assert environment(plugins)[OTHER_ALLOC] == EXPAND
    assert ALLOC not in environment(plugins), "torch would read it first"
    assert environment(plugins, "sglang")[OTHER_ALLOC] == ""


# -------------------------------------------------------------------------
# Devices
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "visible", "index"),
    [
        (["3"], None, 3),
        (["0", "1"], None, 0),
        (["3"], "3", 0),
        (["3"], "1, 3", 1),
        (["1"], "0,1,-1,2", 1),
        (["GPU-8932f937-d72c"], "GPU-74c1a2b3,GPU-8932f937-d72c", 1),
        (["GPU-8932f937-d72c"], "GPU-74c1,GPU-8932", 1),
        (["GPU-8932"], "GPU-74c1a2b3,GPU-8932f937-d72c", 1),
        (["MIG-2"], "MIG-2", 0),
        (["MIG-GPU-74c1/1/0"], "MIG-GPU-74c1/0/0,MIG-GPU-74c1/1/0", 1),
        (["MIG-8f3a-1"], "GPU-8f3a,MIG-8f3a-1", 1),
    ],
)
def test_an_id_is_found_among_the_visible_devices(ids: list[str], visible: str | None, index: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert CUDA.local_device(ids, environ) == index


@pytest.mark.parametrize(
    ("ids", "visible"),
    [
        (["3"], "0,1"),
        (["3"], "0,-1,3"),
        (["3"], "0,,3"),
        (["3"], ""),
        (["3"], "-1"),
        (["3"], "3,3"),
        (["GPU-1"], "GPU-1,GPU-2, GPU-1"),
        (["GPU-8932"], None),
        (["GPU-8932"], "0,1"),
        (["MIG-2"], "GPU-2"),
        (["3"], "GPU-3"),
    ],
)
def test_a_device_that_is_not_visible(ids: list[str], visible: str | None) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(PlacementError, match="VISIBLE_DEVICES") as caught:
        CUDA.local_device(ids, environ)
    assert caught.value.hint


# -------------------------------------------------------------------------
# Servers
# -------------------------------------------------------------------------


def config(*, sleeps: bool = False, engine: str = "sglang", **sglang: Any) -> Any:
    arguments = {name.replace("_", "-"): value for name, value in sglang.items()}
    rollout = SimpleNamespace(engine=engine, sglang=arguments, groups=())
    return SimpleNamespace(
        rollout=rollout,
        placement=SimpleNamespace(sleeps=sleeps),
        train=SimpleNamespace(provider=None, provider_options={}),
    )


def problems(given: Any, *, ok: bool = True) -> list[str]:
    backend: Any = SimpleNamespace(name="cuda", probe=lambda: SimpleNamespace(ok=ok))
    return [problem.path for problem in check_config(given, backend) or ()]


def test_servers_that_sleep_need_the_memory_saver() -> None:
    """It is not installed where the tests run; on a host without a GPU it may be so elsewhere."""
    assert problems(config(sleeps=True)) == ["placement.colocated"]
    assert problems(config(sleeps=True), ok=False) == []
    assert problems(config()) == []
    assert problems(config(sleeps=True, engine="transformers")) == []


def test_both_ends_have_one_kind_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(config(enable_symm_mem=True)) == ["rollout.sglang.enable_symm_mem"]
    assert problems(config(enable_symm_mem=False)) == []
    given = config()
    given.rollout.groups = (SimpleNamespace(sglang={}), SimpleNamespace(sglang={"enable_symm_mem": True}))
    assert problems(given) == ["rollout.groups[1].sglang.enable_symm_mem"]
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert problems(config(enable_symm_mem=True)) == []
