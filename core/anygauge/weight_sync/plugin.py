"""The core's own weight transports, registered through the same hook as anybody's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from anygauge_hooks import hookimpl
from anygauge_hooks.weights import WeightTransportSpec

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.weights import WeightTransport

__all__ = ["register_weight_transports"]


@hookimpl
def register_weight_transports() -> Iterable[WeightTransportSpec]:
    """Return the transports that need nothing but torch and a file system."""
    return [
        WeightTransportSpec(
            name="tensor", make=_tensor, same_host=True, shares_buffers=True, buffer_device=_own_device
        ),
        WeightTransportSpec(name="disk", make=_disk),
        WeightTransportSpec(name="delta", make=_delta),
        WeightTransportSpec(
            name="distributed", make=_distributed, buffer_device=_own_device, same_device=False
        ),
    ]


def _own_device(context: WorkerContext) -> str:
    return str(context.device.torch_device)


def _tensor(config: Config, context: WorkerContext) -> WeightTransport:
    from anygauge.weight_sync.transports.tensor import TensorTransport

    return TensorTransport()


def _delta(config: Config, context: WorkerContext) -> WeightTransport:
    from anygauge.weight_sync.transports.delta import DeltaTransport

    return DeltaTransport(deadline_s=config.weight_sync.deadline_s)


def _distributed(config: Config, context: WorkerContext) -> WeightTransport:
    from anygauge.weight_sync.transports.distributed import DistributedTransport

    return DistributedTransport(context.backend.dist_backend, deadline_s=config.weight_sync.deadline_s)


def _disk(config: Config, context: WorkerContext) -> WeightTransport:
    from anygauge.weight_sync.transports.disk import DiskTransport

    own = config.run.directory / config.run.name / "weights"
    return DiskTransport(config.weight_sync.directory or own, config.model.path)
