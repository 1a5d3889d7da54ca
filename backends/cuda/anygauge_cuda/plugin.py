"""Hook implementations of the CUDA backend. Nothing here imports torch before a hook needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anygauge_cuda import comm, env, host, probe, rollout, transformer_engine
from anygauge_hooks import hookimpl
from anygauge_hooks.devices import socket_variables
from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.settings import RunConfig
from anygauge_hooks.types import BackendSpec, ConfigChange, ConfigProblem, Device, Phase

__all__ = ["CUDA"]

GIB = 1 << 30

CUDA = BackendSpec(
    name="cuda",
    device_type="cuda",
    dist_backend="nccl",
    probe=probe.probe,
    aliases=("gpu",),
    scheduler_resource="GPU",
    local_device=env.local_device,
    visible_devices_env=env.VISIBLE_DEVICES,
    visible_devices=env.visible_devices,
    hidden_env=env.HIDDEN,
    master_weight_bytes=2,
    # Only the H200's is measured here.
    device_memory={
        "H200": 139.8 * GIB,
        "H100": 79.6 * GIB,
        "A100": 79.3 * GIB,
        "A100-40": 39.4 * GIB,
        "L40S": 44.5 * GIB,
        "4090": 23.6 * GIB,
    },
    host_checks=host.host_checks,
    providers=(transformer_engine.NAME,),
    profile_kinds=("memory",),
)


@hookimpl
def register_backends() -> Iterable[BackendSpec]:
    """Provide NVIDIA GPUs."""
    return [CUDA]


@hookimpl
def prepare_worker(role: str, phase: Phase, config: RunConfig | None, log: str | None) -> None:
    """Say where torch writes what explains a hang or a lack of memory, and bind trainers to near cores."""
    if phase != "after_config" or config is None:
        return
    from anygauge_cuda import diagnosis, numa

    if log is not None:
        diagnosis.write_diagnosis(log)
    if role not in env.ENGINES:
        numa.bind_to_device()


@hookimpl
def make_device(index: int) -> Device:
    """Make the device object of a GPU and make it current."""
    from anygauge_cuda.device import CudaDevice

    return CudaDevice(index)


@hookimpl
def register_kernels() -> Iterable[KernelImpl]:
    """Register the backend's kernels."""
    from anygauge_cuda.kernels import kernels

    return kernels()


@hookimpl
def make_communicator(options: Any, group_options: Any | None) -> Any:
    """Make the communicator of a group."""
    return comm.communicator(options, group_options)


@hookimpl
def make_process_group_options(group_name: str, timeout_s: float) -> Any | None:
    """Make the options of an NCCL group."""
    return comm.group_options(group_name, timeout_s)


@hookimpl
def make_optimizer(
    param_groups: Sequence[Mapping[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Any | None:
    """Make AdamW in one kernel."""
    from anygauge_cuda.optimizer import adamw

    return adamw(param_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


@hookimpl
def get_spec_provider(config: RunConfig) -> Any | None:
    """Name Transformer Engine's modules where the run asks for them."""
    if config.train.provider != transformer_engine.NAME:
        return None
    return transformer_engine.provide()


@hookimpl
def worker_env(
    role: str, deterministic: bool, interface: str | None, ip_version: str, train_engine: str | None
) -> Mapping[str, str]:
    """Set up CUDA workers."""
    defaults = {**env.WORKER, **env.order_of_kernels(train_engine)}
    chosen = {**env.users_choice(defaults), **env.allocator(role)}
    exact = env.DETERMINISTIC if deterministic else {}
    return {**chosen, **exact, **socket_variables("NCCL", interface, ip_version)}


@hookimpl
def adjust_config() -> Iterable[ConfigChange]:
    """Choose the precision of the weights."""
    return [ConfigChange(path="train.dtype", value="bfloat16", reason="tensor cores")]


@hookimpl
def check_config(config: RunConfig, backend: BackendSpec) -> Iterable[ConfigProblem]:
    """Check the provider; what a server needs to sleep; that both ends of the weights' way have one memory.

    What is not installed here may be so where the run goes: it is missed where there is a GPU.
    """
    served = (rollout,) if config.rollout.engine == "sglang" else ()
    absent = (transformer_engine, *served) if backend.probe().ok else ()
    return [
        *transformer_engine.option_problems(config),
        *(problem for each in served for problem in each.unlike_memory(config)),
        *(problem for each in absent for problem in each.missing(config)),
    ]


@hookimpl
def rollout_engine_args(config: RunConfig, engine: str) -> Mapping[str, Any] | None:
    """Name the device to a server, and let it sleep where it shares that with trainers."""
    return rollout.engine_args(engine, sleeps=config.placement.sleeps)


@hookimpl
def report_environment() -> Mapping[str, str]:
    """Report the versions of the driver and of NCCL, where they are installed."""
    return host.facts()
