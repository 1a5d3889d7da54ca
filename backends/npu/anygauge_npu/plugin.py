"""Hook implementations of the Ascend NPU backend. Nothing here imports torch before a hook needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from anygauge_hooks import hookimpl
from anygauge_hooks.devices import socket_variables
from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.settings import RunConfig
from anygauge_hooks.types import BackendSpec, ConfigChange, ConfigProblem, Device, Phase
from anygauge_npu import comm, env, host, mindspeed, probe, rollout

__all__ = ["NPU"]

NPU = BackendSpec(
    name="npu",
    device_type="npu",
    dist_backend="hccl",
    probe=probe.probe,
    scheduler_resource="NPU",
    local_device=env.NPUS.local_index,
    visible_devices_env=env.VISIBLE_DEVICES,
    visible_devices=env.visible_devices,
    hidden_env=env.HIDDEN,
    providers=(mindspeed.NAME,),
    profile_kinds=("memory", "npu"),
    engine_installs=rollout.INSTALLS,
    host_checks=host.host_checks,
)


@hookimpl
def register_backends() -> Iterable[BackendSpec]:
    """Provide Ascend NPUs."""
    return [NPU]


@hookimpl
def prepare_worker(role: str, phase: Phase, config: RunConfig | None, log: str | None) -> None:
    """Load torch-npu, which registers the device with torch, and then what the run chooses."""
    if phase == "before_vendor_import":
        env.import_vendor()
    if mindspeed.is_chosen(config, role):
        (mindspeed.load if phase == "before_vendor_import" else mindspeed.reapply)(config, log)


@hookimpl
def make_device(index: int) -> Device:
    """Make the device object of an NPU and make it current."""
    from anygauge_npu.device import NpuDevice

    return NpuDevice(index)


@hookimpl
def make_communicator(options: Any, group_options: Any | None) -> Any:
    """Make the communicator of a group."""
    return comm.communicator(options, group_options)


@hookimpl
def make_process_group_options(group_name: str, timeout_s: float) -> Any | None:
    """Make the options of an HCCL group."""
    return comm.group_options(group_name, timeout_s)


@hookimpl
def make_optimizer(
    param_groups: Sequence[Mapping[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Any | None:
    """Make torch's fused AdamW."""
    return fused_adamw(param_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def fused_adamw(param_groups: Sequence[Mapping[str, Any]], **settings: Any) -> Any:
    """Return torch's AdamW (https://arxiv.org/abs/1711.05101 algorithm 2) with its fused kernel.

    Torch-npu serves torch's own operator with CANN's (``aclnnApplyAdamWV2``); ``npu_apply_adam_w`` only has
    the older kernel, which is compiled on first use.
    """
    import torch

    return torch.optim.AdamW([dict(group) for group in param_groups], **settings, fused=True)


@hookimpl
def worker_env(
    role: str,
    deterministic: bool,
    interface: str | None,
    ip_version: str,
    timeout_s: float,
) -> Mapping[str, str]:
    """Set up NPU workers."""
    own = env.SERVER if role == "sglang" else env.ALLOCATOR
    chosen = env.users_choice({**env.WORKER, **own, **env.timeouts(timeout_s)})
    exact = env.DETERMINISTIC if deterministic else {}
    return {**env.LOADED, **chosen, **exact, **socket_variables("HCCL", interface, ip_version)}


@hookimpl
def adjust_config() -> Iterable[ConfigChange]:
    """Choose the precision of the weights."""
    return [ConfigChange(path="train.dtype", value="bfloat16", reason="cube units")]


@hookimpl
def register_kernels() -> Iterable[KernelImpl]:
    """Provide torch-npu's fused operators."""
    from anygauge_npu.kernels import npu_kernels

    return npu_kernels()


@hookimpl
def check_config(config: RunConfig, backend: BackendSpec) -> Iterable[ConfigProblem]:
    """Check what the provider is given, and that it is there; without an NPU it may be so elsewhere."""
    absent = mindspeed.missing(config) if backend.probe().ok else ()
    return [*mindspeed.option_problems(config), *absent]


@hookimpl
def get_spec_provider(config: RunConfig) -> Any | None:
    """Name MindSpeed's linears where the run asks for them."""
    if config.train.provider != mindspeed.NAME:
        return None
    return mindspeed.Modules() if config.train.provider_options.get("linears") else None


@hookimpl
def rollout_engine_args(config: RunConfig, engine: str) -> Mapping[str, Any] | None:
    """Name the device to a server, and let it sleep where it shares that with trainers."""
    return rollout.engine_args(engine, sleeps=config.placement.sleeps)


@hookimpl
def make_profiler(kind: str, path: str) -> AbstractContextManager[Any] | None:
    """Record with Ascend's profiler."""
    if kind != "npu":
        return None
    from anygauge_npu.profiler import ascend_profile

    return ascend_profile(path)


@hookimpl
def report_environment() -> Mapping[str, str]:
    """Report the versions of driver, firmware and CANN, where they are installed."""
    return host.facts()
