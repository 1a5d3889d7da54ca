"""Settings of collectives reach the vendor's library through its backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from anygauge.config.schema import Config
from anygauge.plugins import find_backend, load_plugins
from anygauge.runtime.launch import worker_environment


def whole_environment(backend: str, **sections: Any) -> Mapping[str, str]:
    given = {"run": {"name": "r"}, "model": "m", "data": {"train": []}, **sections}
    plugins = load_plugins(only=["cpu", "cuda", "npu"])
    found = find_backend(plugins, plugins.named("register_backends"), backend)
    return worker_environment(Config.model_validate(given), found, plugins, "actor")


def environment(backend: str, **cluster: Any) -> dict[str, str]:
    env = whole_environment(backend, cluster=cluster)
    return {name: value for name, value in env.items() if "_SOCKET_IFNAME" in name or "_FAMILY" in name}


@pytest.mark.parametrize(("backend", "library"), [("cuda", "NCCL"), ("npu", "HCCL")])
def test_a_vendors_library_is_told_both(backend: str, library: str) -> None:
    assert environment(backend) == {}
    assert environment(backend, interface="ib0", ip_version="6") == {
        "GLOO_SOCKET_IFNAME": "ib0",
        f"{library}_SOCKET_IFNAME": "=ib0",
        f"{library}_SOCKET_FAMILY": "AF_INET6",
    }
    assert environment(backend, ip_version="4") == {f"{library}_SOCKET_FAMILY": "AF_INET"}


def test_the_host_is_told_the_interface() -> None:
    assert environment("cpu", interface="eth0", ip_version="4") == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_kernels_of_a_gpu_are_ordered_for_the_engine_that_relies_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    megatron, fsdp = (whole_environment("cuda", train={"engine": engine}) for engine in ("megatron", "fsdp"))
    assert megatron.keys() - fsdp.keys() == {"CUDA_DEVICE_MAX_CONNECTIONS"}
