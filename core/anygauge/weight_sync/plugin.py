"""Built-in weight transports, registered like those of any plugin."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.rules.weight_sync import are_on_other_devices, are_on_other_hosts
from anygauge_hooks import hookimpl
from anygauge_hooks.types import ConfigChange
from anygauge_hooks.weights import WeightTransportSpec

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.types import BackendSpec
    from anygauge_hooks.weights import WeightTransport

__all__ = ["adjust_config", "register_weight_transports"]


@hookimpl
def register_weight_transports() -> Iterable[WeightTransportSpec]:
    """Return the built-in transports, which need only torch and a file system."""
    return [
        WeightTransportSpec(
            name="tensor",
            make=_tensor,
            same_host=True,
            other_device=False,
            shares_buffers=True,
            buffer_device=_own_device,
        ),
        WeightTransportSpec(name="disk", make=_disk),
        WeightTransportSpec(name="adapter", make=_adapter),
        WeightTransportSpec(name="delta", make=_delta, needs_receiver=True),
        WeightTransportSpec(
            name="distributed",
            make=_distributed,
            buffer_device=_own_device,
            same_device=False,
            several_senders=True,
        ),
    ]


@hookimpl
def adjust_config(config: Config, backend: BackendSpec) -> Iterable[ConfigChange] | None:
    """Choose a transport for servers that share no memory with the trainers."""
    if not config.has_engines_apart:
        return None
    if are_on_other_devices(config, backend):
        reason = "engines have devices of their own"
    elif are_on_other_hosts(config):
        reason = "engines may be on other hosts"
    else:
        return None
    return [ConfigChange(path="weight_sync.transport", value="distributed", reason=reason)]


def _own_device(context: WorkerContext) -> str:
    return str(context.device.torch_device)


def _tensor(config: Any, context: WorkerContext) -> WeightTransport:
    from anygauge.weight_sync.transports.tensor import TensorTransport

    return TensorTransport()


def _delta(config: Any, context: WorkerContext) -> WeightTransport:
    from anygauge.weight_sync.transports.delta import DeltaTransport

    return DeltaTransport(deadline_s=config.weight_sync.deadline_s, forgets=config.placement.sleeps)


def _distributed(config: Any, context: WorkerContext) -> WeightTransport:
    from anygauge.weight_sync.transports.distributed import DistributedTransport

    backend = context.backend
    others = context.plugins.named("register_backends").values()
    backends = {each.device_type: each.dist_backend for each in others}
    return DistributedTransport(
        backend.device_type,
        {**backends, backend.device_type: backend.dist_backend},  # of its type of device there may be others
        deadline_s=config.weight_sync.deadline_s,
        sender=context.rank,
    )


def _disk(config: Any, context: WorkerContext) -> WeightTransport:
    from anygauge.weight_sync.transports.disk import DiskTransport

    return DiskTransport(_directory(config), config.model.path)


def _adapter(config: Any, context: WorkerContext) -> WeightTransport:
    from anygauge.config.lora import adapter_config, lora_settings
    from anygauge.weight_sync.transports.adapter import AdapterTransport

    settings, base = lora_settings(config.train.lora), config.model.path
    return AdapterTransport(
        _directory(config), base, lambda layers: adapter_config(settings, base, layers, saved=())
    )


def _directory(config: Any) -> Path:
    own: Path = config.run.directory / config.run.name / "weights"
    return config.weight_sync.directory or own
