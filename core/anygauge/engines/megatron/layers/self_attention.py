"""Megatron's grouped-query attention: with a shorter path from its projection to its kernel, and with a gate.

Megatron imports happen here at module level: import this file only after ``prepare_megatron``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from torch import Tensor

from anygauge.engines.megatron.layers.modules import CoreAttention, PackedSequences, is_plain, weight_of

__all__ = ["GatedAttention", "SelfAttention"]


class SelfAttention(MegatronSelfAttention):
    """Splits, normalizes and rotates in one op where all of these are ours; else it does as Megatron does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_short = (
            isinstance(self.core_attention, CoreAttention)
            and all(is_plain(norm) for norm in (self.q_layernorm, self.k_layernorm))
            and not self.config.rotary_interleaved
            and not self.config.fine_grained_activation_offloading
            and self.config.num_query_groups >= self.world_size
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **inputs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output ``[T, 1, H]`` and its bias.

        :param hidden_states: ``[T, 1, H]``, or this rank's part of it under sequence parallelism.
        """
        packed = inputs.get("packed_seq_params")
        if not self.is_short or packed is None:
            outputs: tuple[Tensor, Tensor | None] = super().forward(hidden_states, attention_mask, **inputs)
            return outputs
        return self._short(hidden_states, packed)

    def _short(self, hidden: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor | None]:
        qkv = self.linear_qkv(hidden)[0]
        heads = qkv.view(
            len(qkv), self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        )
        norms = self.q_layernorm, self.k_layernorm
        weights = [weight_of(norm) for norm in norms]
        split = self.core_attention.prepare(heads, *weights, packed.cos, packed.sin, norms[0].eps)
        attend = partial(self.core_attention.attend_to, packed=packed)
        is_recomputed = self.checkpoint_core_attention and self.training
        attended = checkpoint(attend, False, *split) if is_recomputed else attend(*split)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended.unsqueeze(1))
        return output


class GatedAttention(MegatronSelfAttention):
    """Megatron's attention with an output gate for each query head (https://arxiv.org/abs/2505.06708).

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
