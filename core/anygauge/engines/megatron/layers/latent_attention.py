"""Multi-head latent attention, https://arxiv.org/abs/2412.19437 section 2.1.1.

Megatron's own makes its angles itself and turns queries and keys before its core attention. Here the core
attention turns them, as in every other layer: the dimensions that turn are the first ones of each head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from anygauge.engines.megatron.gradients import replace_first
from anygauge.engines.megatron.layers.linear import linear

if TYPE_CHECKING:
    from anygauge.engines.megatron.layers.provider import SpecProvider

__all__ = ["LatentAttention", "LatentAttentionSubmodules", "ReplicatedLinear", "attention_spec"]

LATENT_EPSILON = 1e-6
"""Epsilon of the latent norms; checkpoints of the family have no key for it."""


@dataclass
class LatentAttentionSubmodules:
    """The parts of latent attention."""

    linear_up: Any
    """The linear from a latent, or from hidden states, to all heads."""
    norm: Any
    """Norm of a latent."""
    core_attention: Any
    linear_proj: Any
    sharded_state_dict_keys_map: dict[str, str] = field(
        default_factory=lambda: {
            "q_layernorm.": "linear_q_up_proj.layer_norm_",
            "kv_layernorm.": "linear_kv_up_proj.layer_norm_",
        }
    )
    """Transformer Engine fuses the norm of a latent into the linear that follows."""


def attention_spec(provider: SpecProvider, config: TransformerConfig) -> ModuleSpec:
    """Return latent attention; its sizes are fields of the config."""
    assert isinstance(config, MLATransformerConfig)
    core = partial(
        provider.core_attention(),
        k_channels=config.qk_pos_emb_head_dim + config.qk_head_dim,
        v_channels=config.v_head_dim,
    )
    submodules = LatentAttentionSubmodules(
        linear_up=provider.column_parallel_linear(),
        norm=provider.norm(),
        core_attention=core,
        linear_proj=provider.row_parallel_linear(),
    )
    return ModuleSpec(
        module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules
    )


class ReplicatedLinear(nn.Module):
    """A linear that every rank of a tensor-parallel group has whole.

    Under sequence parallelism each applies it to its own tokens, and Megatron adds up the gradients of
    weights with the mark.
    """

    def __init__(self, in_features: int, out_features: int, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=config.params_dtype))
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        replace_first(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T``."""
        return linear(x, self.weight)


class LatentAttention(Attention):
    """Attention whose keys and values, and queries where there is a rank for them, come from latents."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", **options)
        self.submodules_config = submodules
        """Its names of norms are those of checkpoints."""
        self.turning, self.still = config.qk_pos_emb_head_dim, config.qk_head_dim
        self.value_size = config.v_head_dim
        query_size = self.turning + self.still
        # Megatron's forward pass looks for both.
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm = None
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(config.hidden_size, query_size, "q_proj")
        else:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
            self.q_layernorm = self._norm(config.q_lora_rank)
            self.linear_q_up_proj = self._up(config.q_lora_rank, query_size, "q_up_proj")
        compressed = config.kv_lora_rank + self.turning
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, compressed, config)
        self.kv_layernorm = self._norm(config.kv_lora_rank)
        self.linear_kv_up_proj = self._up(config.kv_lora_rank, self.still + self.value_size, "kv_up_proj")

    def _up(self, width: int, size: int, name: str) -> nn.Module:
        linear: nn.Module = build_module(
            self.submodules_config.linear_up,
            width,
            size * self.config.num_attention_heads,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name=name,
            tp_group=self.tp_group,
        )
        return linear

    def _norm(self, width: int) -> nn.Module:
        norm: nn.Module = build_module(
            self.submodules_config.norm, config=self.config, hidden_size=width, eps=LATENT_EPSILON
        )
        return norm

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values, the dimensions that turn with the position first.

        :param hidden_states: ``[T, 1, H]``, under sequence parallelism this rank's tokens.
        :returns: ``[T, 1, N, D]``, ``[T, 1, N, D]`` and ``[T, 1, N, E]`` of all tokens.
        """
        compressed = self.linear_kv_down_proj(hidden_states)
        latent, turning = compressed.split([compressed.shape[-1] - self.turning, self.turning], dim=-1)
        shared = self._for_all_heads(turning).unsqueeze(-2)
        expanded = self._heads(self.linear_kv_up_proj(self.kv_layernorm(latent)))
        still, value = expanded.split([self.still, self.value_size], dim=-1)
        key = torch.cat((shared.expand(-1, -1, still.shape[-2], -1), still), dim=-1)
        query = self._queries(hidden_states).roll(self.turning, dims=-1)
        return query, key, value

    def _queries(self, hidden_states: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            return self._heads(self.linear_q_proj(hidden_states))
        assert self.q_layernorm is not None
        latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        return self._heads(self.linear_q_up_proj(latent))

    def _heads(self, output_and_bias: tuple[Tensor, Tensor | None]) -> Tensor:
        return output_and_bias[0].unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _for_all_heads(self, x: Tensor) -> Tensor:
        """Return a part of the keys that heads on all ranks share; its gradient is the sum of theirs."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group)
