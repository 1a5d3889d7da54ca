"""Modules that the layer spec names. Each takes its kernel from the table when it is built.

Megatron imports happen here at module level: import this file only after ``prepare_megatron``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import getfile
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from anygauge.engines.megatron.layers.context_parallel import SequenceParts, gather_together
from anygauge.engines.megatron.layers.recompute import can_be_made
from anygauge.engines.megatron.layers.routing import Routes
from anygauge.engines.megatron.media.merge import Deposits
from anygauge.kernels.table import KernelTable
from anygauge_hooks.errors import ConfigError

__all__ = [
    "CoreAttention",
    "LayerNorm",
    "PackedSequences",
    "RmsNorm",
    "WideNorm",
    "await_weights",
    "is_megatrons",
    "is_plain",
    "weight_of",
]


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packing parameters, with what our attention needs beside them."""

    lengths: tuple[int, ...] = ()
    """Length of each sequence, or of each part of one that follows what it attends to, on the host."""
    key_lengths: tuple[int, ...] | None = None
    """Length of what each part attends to, under context parallelism and with prefix packing."""
    key_rows: Tensor | None = None
    """Which rows of all context-parallel ranks that is, ``[sum(key_lengths)]``, int64, on the device."""
    parts: SequenceParts | None = None
    """How the sequences are divided among ranks, on the host."""
    counts: Tensor | None = None
    """``[T]``, int64: how many samples have each of this rank's tokens: 0 for padding, more than 1 in a
    shared prompt; ``None`` if it is 1 everywhere."""
    cos: Tensor | None = None
    """``[T, R]``, float32."""
    sin: Tensor | None = None
    """``[T, R]``, float32."""
    local_angles: tuple[Tensor, Tensor] | None = None
    """The same two of local layers, where theirs are others."""
    routes: Routes | None = None
    """Which experts the tokens go to, where a pass captures or replays it."""
    deposits: Sequence[Deposits] = ()
    """Features that the first layers add; set by the first stage's forward pass."""

    @cached_property
    def without_rotary(self) -> PackedSequences:
        """The same for layers whose queries and keys do not turn: every angle is 0, for any kernel."""
        assert self.cos is not None
        return replace(self, cos=torch.ones_like(self.cos), sin=torch.zeros_like(self.cos))

    @cached_property
    def with_local_rotary(self) -> PackedSequences:
        """The same for layers whose queries and keys turn by the angles of local layers."""
        assert self.local_angles is not None
        return replace(self, cos=self.local_angles[0], sin=self.local_angles[1])


class RmsNorm(nn.Module):
    """Root mean square norm; also the norm of queries and keys."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        kernels: KernelTable,
        remade: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.remade = remade
        """Whether a linear makes the output again in its backward pass."""
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron all-reduces the gradients of weights with this mark, an attribute that torch does not
        # declare, over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        # A weight is near 0 then, and 1 more of it in bfloat16 would be another one.
        dtype = torch.float32 if self.is_zero_centered else config.params_dtype
        self.kernel = kernels.resolve("rms_norm", dtype=dtype)
        self.add = kernels.resolve("add_rms_norm", dtype=dtype)

    # One method for both, since what hooks of Megatron's wait for hangs on a call of the module.
    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, with_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize the last dimension of ``x``, or of its sum with a residual.

        :param residual: Only with the sum.
        :param with_sum: Whether what is normalized is returned too, before its norm, for what goes around
            that: their gradients meet in one kernel. Not of weights that are centered on 0.
        """
        if not with_sum:
            assert residual is None
            output = self._normalize(x)
            return can_be_made(output, self._normalize, x) if self.remade else output
        assert not self.is_zero_centered
        total, output = self.add(x, self.weight, self.eps, residual)
        return total, can_be_made(output, self._normalize_sum, total) if self.remade else output

    def _normalize_sum(self, total: Tensor) -> Tensor:
        """Make the output again by the op that made it: another source may give other bits."""
        return self.add(total, self.weight, self.eps, None)[1]

    def _normalize(self, x: Tensor) -> Tensor:
        if self.is_zero_centered:
            return self.kernel(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)
        return self.kernel(x, self.weight, self.eps)


class WideNorm(RmsNorm):
    """Root mean square norm of all queries, or keys, of a token as one.

    :raises ConfigError: Ranks divide the heads.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, heads: int, **options: Any
    ) -> None:
        if config.tensor_model_parallel_size > 1:
            raise ConfigError(
                f"train.parallel.tensor = {config.tensor_model_parallel_size} divides the heads of a model "
                "whose queries and keys are normalized over all heads.",
                hint="Leave it at 1; pipeline, context and data parallelism divide such a model.",
            )
        super().__init__(config, hidden_size * heads, eps, **options)

    def _normalize(self, x: Tensor) -> Tensor:
        """Return ``[..., N, D]`` of the same."""
        return super()._normalize(x.flatten(-2)).view(x.shape)


def is_plain(norm: Any) -> bool:
    """Return whether a module of any provider is a norm that the kernels know as it is."""
    return type(norm) is RmsNorm and not norm.is_zero_centered


def is_megatrons(module: type, name: str) -> bool:
    """Return whether a method of a Megatron module is the original, not patched by a provider."""
    code = getattr(getattr(module, name), "__code__", None)
    return code is not None and code.co_filename == getfile(module)


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a module that is not called, once a hook of Megatron's has waited for it."""
    _run_hooks(module)
    assert isinstance(module.weight, Tensor)
    return module.weight


def await_weights(model: nn.Module) -> None:
    """Wait for all weights of a part of a model, some of whose modules may not be called."""
    for module in model.modules():
        if module._parameters:
            _run_hooks(module)


def _run_hooks(module: nn.Module) -> None:
    for number, hook in module._forward_pre_hooks.items():
        hook(module, (), *([{}] if number in module._forward_pre_hooks_with_kwargs else []))


class LayerNorm(nn.Module):
    """Layer norm, for parts of a model that were trained with it, such as a vision tower."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, kernels: KernelTable, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as above
        self.kernel = kernels.resolve("layer_norm", dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of ``x``."""
        return self.kernel(x, self.weight, self.bias, self.eps)


class CoreAttention(nn.Module):
    """Rotary embedding and attention over packed sequences.

    Positions are applied here, not by Megatron: its rotary path splits a packed batch sequence by sequence,
    and one place that takes cosines and sines serves every position scheme.
    """

    def __init__(
        self,
        config: TransformerConfig,
        kernels: KernelTable,
        unit_angles: bool,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        window: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.window = window
        """How many of the last tokens a token sees; ``None`` for all."""
        self.softmax_offset = _make_sinks(config) if config.softmax_type == "learnable" else None
        head_dim = k_channels or config.kv_channels
        facts = {"dtype": config.params_dtype, "head_dim": head_dim}
        self.attend = kernels.resolve(
            "varlen_attention",
            causal=True,
            value_dim=v_channels or head_dim,
            return_lse=False,
            has_window=window is not None,
            has_sinks=self.softmax_offset is not None,
            **facts,
        )
        self.rotate = kernels.resolve("rotary_embedding", unit_angles=unit_angles, **facts)
        self.prepare = kernels.resolve("qk_norm_rotary", unit_angles=unit_angles, **facts)
        self.interleaved = config.rotary_interleaved
        self.scale = softmax_scale if softmax_scale is not None else head_dim**-0.5
        group = parallel_state.get_context_parallel_group()
        self.context_group = group if group.size() > 1 else None

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
        :param value: ``[T, K, E]``.
        :param attention_mask: Unused; packing and causality say it all.
        :returns: ``[T, H E]``.
        """
        packed = packed_seq_params
        assert packed.cos is not None
        if self.interleaved:
            query, key = (_halves(x, packed.cos.shape[-1]) for x in (query, key))
        query, key = self.rotate(query, key, packed.cos, packed.sin)
        return self.attend_to(query, key, value, packed)

    def attend_to(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Return the attention ``[T, H E]`` of rotated queries to rotated keys."""
        if packed.key_rows is not None:
            key, value = gather_together((key, value), packed.key_rows, self.context_group)
        if self.softmax_offset is not None:
            _run_hooks(self)  # an attention that goes the short way does not call this module
        output = self.attend(
            query,
            key,
            value,
            packed.lengths,
            self.scale,
            causal=True,
            key_lengths=packed.key_lengths,
            window=self.window,
            sinks=self.softmax_offset,
        )
        return output.reshape(output.shape[0], -1)


def _make_sinks(config: TransformerConfig) -> nn.Parameter:
    """Return the sink of each head of this rank, under the name that Megatron's attention has for it."""
    heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
    return nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))


def _halves(x: Tensor, rotary: int) -> Tensor:
    """Move pairs of neighbors into two halves; alike for queries and keys, scores stay the same."""
    turned = x[..., :rotary].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((turned, x[..., rotary:]), dim=-1)
