"""Hook implementations of the CUDA backend. Nothing here imports torch before a hook needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anygauge_cuda import comm, env, probe, rollout
from anygauge_hooks import hookimpl
from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.types import BackendSpec, ConfigChange, Device

__all__ = ["CUDA"]

CUDA = BackendSpec(
    name="cuda",
    device_type="cuda",
    dist_backend="nccl",
    probe=probe.probe,
    ray_options=env.ray_options,
    local_device=env.local_device,
    visible_devices_env=env.VISIBLE_DEVICES,
    make_communicator=comm.communicator,
)


@hookimpl
def register_backends() -> Iterable[BackendSpec]:
    """Provide NVIDIA GPUs."""
    return [CUDA]


@hookimpl
def make_device(backend: BackendSpec, index: int) -> Device | None:
    """Make the device object of a GPU and make it current."""
    if backend.name != CUDA.name:
        return None
    from anygauge_cuda.device import CudaDevice

    return CudaDevice(index)


@hookimpl
def register_kernels(backend: BackendSpec) -> Iterable[KernelImpl] | None:
    """Provide what is faster than the references."""
    if backend.name != CUDA.name:
        return None
    from anygauge_cuda.kernels import kernels

    return kernels()


@hookimpl
def worker_env(
    backend: BackendSpec, deterministic: bool, interface: str | None, ip_version: str
) -> Mapping[str, str]:
    """Set up CUDA workers; hide every GPU from the workers of another backend."""
    if backend.name != CUDA.name:
        return env.HIDDEN
    exact = env.DETERMINISTIC if deterministic else {}
    return {**env.WORKER, **exact, **env.network(interface, ip_version)}


@hookimpl
def adjust_config(backend: BackendSpec) -> Iterable[ConfigChange] | None:
    """Choose the precision of the weights."""
    return env.config_defaults() if backend.name == CUDA.name else None


@hookimpl
def rollout_engine_args(config: Any, backend: BackendSpec, engine: str) -> Mapping[str, Any] | None:
    """Name the device to a server, and let it sleep where it shares that with trainers."""
    if backend.name != CUDA.name:
        return None
    return rollout.engine_args(engine, sleeps=config.placement.colocated)
