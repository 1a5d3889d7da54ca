"""Hook implementations of the CPU backend. Nothing here imports torch before a hook needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anygauge_cpu import comm, env, probe, rollout
from anygauge_hooks import hookimpl
from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.settings import RunConfig
from anygauge_hooks.types import BackendSpec, ConfigChange, Device, Phase

__all__ = ["CPU"]

CPU = BackendSpec(
    name="cpu",
    device_type="cpu",
    dist_backend="gloo",
    probe=probe.probe,
    scheduler_resource=env.WORKER_SLOT,
    local_device=env.local_device,
    engine_installs=rollout.INSTALLS,
)


@hookimpl
def register_backends() -> Iterable[BackendSpec]:
    """Provide the host."""
    return [CPU]


@hookimpl
def make_device(index: int) -> Device:
    """Make the host's device object."""
    from anygauge_cpu.device import CpuDevice

    return CpuDevice(index)


@hookimpl
def worker_env(role: str) -> Mapping[str, str]:
    """Hide every accelerator from CPU workers; let an SGLang server find its platform."""
    return {**env.HIDDEN_ACCELERATORS, **(rollout.PLATFORM_ENV if role == "sglang" else {})}


@hookimpl
def prepare_worker(phase: Phase) -> None:
    """Hide vendors' extensions of torch; make a torchvision importable that was built for another torch."""
    if phase == "before_vendor_import":
        env.prepare_imports()


@hookimpl
def make_communicator(options: Any, group_options: Any | None) -> Any:
    """Make the communicator of a group."""
    return comm.communicator(options, group_options)


@hookimpl
def rollout_engine_args(config: RunConfig, engine: str) -> Mapping[str, Any] | None:
    """Keep SGLang to what the host has."""
    return rollout.engine_args(engine, config.rollout.max_batch_tokens)


@hookimpl
def adjust_config() -> Iterable[ConfigChange]:
    """Choose the precision of the weights."""
    return env.config_defaults()


@hookimpl
def register_kernels() -> Iterable[KernelImpl]:
    """Provide torch's own fused operators."""
    from anygauge_cpu.kernels import cpu_kernels

    return cpu_kernels()


@hookimpl
def make_jit_fuser() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Leave Megatron's fusible functions as they are: compiling them costs 11 s and gains nothing here."""
    return _identity


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
    """Return torch's AdamW (https://arxiv.org/abs/1711.05101 algorithm 2) with its fused kernel."""
    import torch

    return torch.optim.AdamW([dict(group) for group in param_groups], **settings, fused=True)


def _identity(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
