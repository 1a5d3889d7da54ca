"""Ranks that shard a copy of the model, and ranks that hold the same shard of several copies (HSDP)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from anygauge.distributed.all_gather import all_gather_values
from anygauge.distributed.known_results import GroupUse
from anygauge.engines.fsdp.weights import LocalShard, local
from anygauge.wording import listed
from anygauge_hooks.errors import ReplicaError

__all__ = ["ReplicaCheck", "data_mesh", "mesh_groups"]

_SUMS = TypeAdapter(list[int])
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def data_mesh(replicas: int, device: str, timeout_s: float) -> DeviceMesh:
    """Return the mesh whose last dimension shards weights. A collective.

    Neighboring ranks, which are most often of one host, shard a copy of the model. All groups are new ones: a
    backend may keep the default group small, and it is too slow for weights then.

    :param replicas: Copies of the model; they divide the number of ranks.
    :param timeout_s: Seconds until a collective of a group fails.
    """
    world: Any = dist.group.WORLD
    if dist.get_world_size() == 1:
        return DeviceMesh.from_group(world, device)
    mesh = torch.arange(dist.get_world_size(), dtype=torch.int).view(replicas, -1)
    dimensions = {"replicate": mesh.t(), "shard": mesh} if replicas > 1 else {"shard": mesh}
    own: dict[str, Any] = {}
    for name, groups in dimensions.items():
        for ranks in groups.tolist():  # all ranks take part in the making of each group
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if dist.get_rank() in ranks:
                own[name] = group
    mesh = mesh if replicas > 1 else mesh[0]
    return DeviceMesh.from_group(list(own.values()), device, mesh=mesh, mesh_dim_names=tuple(own))


def mesh_groups(mesh: DeviceMesh) -> list[GroupUse]:
    """Return the process groups that a run calls collectives on."""
    world: Any = dist.group.WORLD
    own = [GroupUse(name, mesh.get_group(name)) for name in mesh.mesh_dim_names or ()]
    return [GroupUse("default", world), *own]


class ReplicaCheck:
    """Compares the weights and gradients of copies of the model.

    :param shards: Those that learn.
    :param every: Optimizer steps from one comparison to the next; 0 compares nothing.
    """

    def __init__(self, mesh: DeviceMesh, shards: Sequence[LocalShard], every: int) -> None:
        self._mesh = mesh
        self._shards = shards
        self._every = every if mesh.ndim > 1 else 0
        self._equal: int | None = None
        """Last step in which they were equal."""

    def check(self, step: int) -> None:
        """Compare them before an optimizer step, if it is time. A collective.

        :raises ReplicaError: They differ; on every rank, and no weight was changed.
        """
        if not self._every or (self._equal is not None and step % self._every):
            return
        own = torch.stack([_sum(each) for shard in self._shards for each in _parts(shard)]).tolist()
        sums = all_gather_values(own, _SUMS)
        odd: dict[str, list[int]] = {}
        for ranks in self._mesh.mesh.t().tolist():
            for index, name in enumerate(self._names()):
                values = [sums[rank][index] for rank in ranks]
                common = Counter(values).most_common(1)[0][0]
                odd.setdefault(name, []).extend(
                    rank for rank, value in zip(ranks, values, strict=True) if value != common
                )
        if differing := [
            f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in odd.items() if ranks
        ]:
            before = f" They were equal in optimizer step {self._equal}." if self._equal is not None else ""
            raise ReplicaError(
                f"Replicas differ in optimizer step {step}: {listed(differing)}.{before}",
                hint="The step changed no weight, and checkpoints from before it stay as they are. Look for "
                "a faulty device, or a communication library that computes wrongly, on the hosts of these "
                "ranks; then resume from a checkpoint.",
            )
        self._equal = step

    def _names(self) -> list[str]:
        return [name for shard in self._shards for name in (shard.name, f"gradient of {shard.name}")]


def _parts(shard: LocalShard) -> tuple[Tensor, Tensor]:
    """Return this rank's weights and gradients; a weight without a part in the step counts twice."""
    gradient: Any = shard.tensor.grad
    return shard.local, shard.local if gradient is None else local(gradient)


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, which one changed bit always changes."""
    return tensor.contiguous().view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64)
