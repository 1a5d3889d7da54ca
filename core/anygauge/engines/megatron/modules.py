"""The modules that the layer spec names. Each takes its kernel from the table when it is built.

Megatron imports happen here at module level: import this file only after ``prepare_megatron``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from anygauge.kernels.table import KernelTable

__all__ = ["CoreAttention", "PackedSequences", "RmsNorm", "Swiglu"]


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packing parameters, with what our attention needs beside them."""

    lengths: tuple[int, ...] = ()
    """Length of each sequence, on the host."""
    cos: Tensor | None = None
    """``[T, R]``, float32."""
    sin: Tensor | None = None
    """``[T, R]``, float32."""


class RmsNorm(nn.Module):
    """Root mean square norm; also the norm of queries and keys."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, kernels: KernelTable, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron all-reduces the gradients of weights with this mark, an attribute that torch does not
        # declare, over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.kernel = kernels.resolve("rms_norm", dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``."""
        return self.kernel(x, self.weight, self.eps)


class Swiglu(MegatronModule):
    """Gated activation of a fused gate-and-up projection.

    A module of Megatron's, because its MLP asks every child for a sharded state.
    """

    def __init__(self, config: TransformerConfig, kernels: KernelTable) -> None:
        super().__init__(config)
        self.kernel = kernels.resolve("swiglu", dtype=config.params_dtype)

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``: ``[..., 2 F]`` to ``[..., F]``."""
        return self.kernel(gate_up)


class CoreAttention(nn.Module):
    """Rotary embedding and attention over packed sequences.

    Positions are applied here, not by Megatron: its rotary path splits a packed batch sequence by sequence,
    and one place that takes cosines and sines serves every position scheme.
    """

    def __init__(
        self,
        config: TransformerConfig,
        kernels: KernelTable,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        facts = {"dtype": config.params_dtype, "head_dim": config.kv_channels}
        self.attend = kernels.resolve("varlen_attention", causal=True, **facts)
        self.rotate = kernels.resolve("rotary_embedding", **facts)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Attend within each sequence.

        :param query: ``[T, H, D]``.
        :param key: ``[T, K, D]``.
        :param value: ``[T, K, D]``.
        :param attention_mask: Unused; packing and causality say it all.
        :returns: ``[T, H D]``.
        """
        packed = packed_seq_params
        query, key = self.rotate(query, key, packed.cos, packed.sin)
        output = self.attend(query, key, value, packed.lengths, self.scale, causal=True)
        return output.reshape(output.shape[0], -1)
