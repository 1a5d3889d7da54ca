"""Attention whose output is multiplied with a gate that comes with the queries (https://arxiv.org/abs/2505.06708)."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

__all__ = ["GatedAttention"]


class GatedAttention(SelfAttention):
    """Megatron's attention with an output gate, from a projection that gives each query head its gate.

    Megatron's own expects all queries of a group before all of its gates. Checkpoints have a head's gate
    behind its query, and so has the canonical weight: a group is ``query, gate, ..., key, value``.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Return queries, keys, values and gates.

        :param hidden_states: ``[T, 1, H]``.
        :returns: ``[T, 1, N, D]``, ``[T, 1, K, D]``, ``[T, 1, K, D]`` and ``[T, 1, N, D]``.
        """
        mixed, _bias = self.linear_qkv(hidden_states)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        sharing, rank = self.world_size // self.config.num_query_groups, self.tp_group.rank()
        if sharing > 1:  # ranks that have parts of one group, and some of its queries each
            every = all_gather_last_dim_from_tensor_parallel_region(mixed, self.tp_group)
            mixed = every.chunk(self.config.num_query_groups, dim=-1)[rank // sharing]
        grouped = mixed.unflatten(-1, (groups, -1, size))
        queries, key, value = grouped.split([grouped.shape[-2] - 2, 1, 1], dim=-2)
        query, gate = queries.flatten(-3, -2).unflatten(-2, (-1, 2)).unbind(-2)
        if sharing > 1:
            query, gate = (x.chunk(sharing, dim=-2)[rank % sharing] for x in (query, gate))
        return self.q_layernorm(query), self.k_layernorm(key.squeeze(-2)), value.squeeze(-2), gate
