"""Stacked experts in Megatron's own dist-checkpoints, under the keys that its grouped experts have there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory
from torch import Tensor

__all__ = ["sharded_experts"]


def sharded_experts(
    key: str, weight: Tensor, split_dim: int, parts: int, before: Sequence[tuple[int, int, int]]
) -> ShardedTensorFactory:
    """Describe a stack of experts as a part of the stack of all of them.

    :param weight: ``[E, out, in]``.
    :param split_dim: Dimension of the stack that expert tensor parallelism splits.
    :param parts: Number of parts of that dimension, each of which is split by itself, such as gate and up.
    :param before: Axes in front of the stack, such as layers that are alike: axis, index, size.
    """
    state: Any = parallel_state
    experts = (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size())
    rank, ways = state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()
    front = len(before)

    def build(
        key: str, tensor: Tensor, replica: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key,
                part,
                *before,
                (front, *experts),
                (front + split_dim, number * ways + rank, parts * ways),
                replica_id=replica,
                prepend_axis_num=front,
            )
            for number, part in enumerate(tensor.chunk(parts, split_dim))
        ]

    def merge(shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), split_dim)

    replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
    return ShardedTensorFactory(key, weight.detach(), build, merge, replica)
