"""Gated DeltaNet (https://arxiv.org/abs/2412.06464) in place of a layer's attention.

Its state and its convolution restart with every packed sequence. Tensor parallelism divides the heads.
Context parallelism does too, for the recurrence alone: a sequence is one long dependency, so ranks exchange
their chunks of all heads for whole sequences of some heads, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from anygauge.engines.megatron.layers.modules import weight_of
from anygauge.kernels.table import KernelTable
from anygauge_hooks.errors import ConfigError

if TYPE_CHECKING:
    from anygauge.engines.megatron.layers.context_parallel import SequenceParts
    from anygauge.engines.megatron.layers.modules import PackedSequences

__all__ = ["DeltaRule", "GatedDeltaNet", "GatedDeltaNetSubmodules", "GatedNorm"]

KEY_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass
class GatedDeltaNetSubmodules:
    """The parts of a gated delta net."""

    in_proj: Any
    delta_rule: Any
    out_norm: Any
    out_proj: Any


class GatedNorm(nn.Module):
    """Root mean square norm of each head, multiplied with the activation of a gate."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, kernels: KernelTable, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.kernel = kernels.resolve("rms_norm", dtype=config.params_dtype)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``norm(x) * silu(gate)``.

        :param x: ``[T, N, E]``, of this rank's heads.
        :param gate: ``[T, N, E]``.
        """
        # Each rank has other heads: the gradient of the weight that they share is the sum over ranks.
        weight = copy_to_tensor_model_parallel_region(self.weight)
        normed = self.kernel(x, weight, self.eps)
        return (normed * F.silu(gate.float())).to(x.dtype)


class DeltaRule(nn.Module):
    """Convolution and recurrence over packed sequences, of any number of heads."""

    def __init__(self, config: TransformerConfig, kernels: KernelTable, **_: Any) -> None:
        super().__init__()
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        facts = {"dtype": config.params_dtype}
        self.convolve = kernels.resolve("causal_conv1d", width=config.linear_conv_kernel_dim, **facts)
        self.rule = kernels.resolve(
            "gated_delta_rule", head_dim=self.key_size, value_dim=self.value_size, **facts
        )

    def forward(self, qkv: Tensor, weight: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the output of each value head.

        :param qkv: ``[T, 2 K D + N E]``: queries and keys of ``K`` heads, values of ``N``, a multiple of
            ``K``; value head ``n`` goes with key head ``n // (N / K)``.
        :param weight: ``[2 K D + N E, W]``, of the convolution.
        :param g: ``[T, N]``, float32: logarithm of the decay.
        :param beta: ``[T, N]``, float32: how much of what is new is written.
        :param lengths: Lengths of the sequences.
        :returns: ``[T, N, E]``.
        """
        heads = g.shape[1]
        keys = (qkv.shape[1] - heads * self.value_size) // 2
        q, k, v = self.convolve(qkv, weight, lengths).split([keys, keys, heads * self.value_size], dim=1)
        q, k = (self._unit(x).repeat_interleave(heads * self.key_size // keys, dim=1) for x in (q, k))
        v = v.unflatten(1, (heads, -1))
        output: Tensor = self.rule(q, k, v, g, beta, lengths, self.key_size**-0.5)
        return output

    def _unit(self, x: Tensor) -> Tensor:
        """Return ``[T, K, D]`` with heads of length 1."""
        wide = x.unflatten(1, (-1, self.key_size)).float()
        squares = wide.square().sum(-1, keepdim=True)
        return (wide * torch.rsqrt(squares + KEY_EPSILON)).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """Projections around convolution, gated delta rule and gated norm."""

    def __init__(
        self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, layer_number: int, **_: Any
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.context_group = parallel_state.get_context_parallel_group()
        self.context = dist.get_world_size(self.context_group)
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        _check_heads(config, tensor * self.context)
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        self.heads = config.linear_num_value_heads // tensor
        self.parts = (keys // tensor, keys // tensor, values // tensor)
        """Widths of this rank's queries, keys and values."""
        linear = {"config": config, "bias": False, "is_expert": False}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            2 * keys + 2 * values + 2 * config.linear_num_value_heads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **linear,
        )
        self.conv1d = _Taps(sum(self.parts), config)
        # Megatron leaves the values of parameters to whoever loads them; these have no initialization.
        self.dt_bias, self.A_log = (
            nn.Parameter(torch.ones(self.heads, dtype=config.params_dtype)) for _ in range(2)
        )
        self.delta_rule = build_module(submodules.delta_rule, config=config)
        self.out_norm = build_module(
            submodules.out_norm,
            config=config,
            hidden_size=config.linear_value_head_dim,
            eps=config.layernorm_epsilon,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **linear,
        )
        self.recompute = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedSequences, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output, and no bias.

        :param hidden_states: ``[T, 1, H]``, under sequence parallelism this rank's tokens.
        :returns: ``[T, 1, H]``.
        """
        projected, _bias = self.in_proj(hidden_states)
        widths = [sum(self.parts), self.parts[2], self.heads, self.heads]
        qkv, gate, beta, decay = projected.squeeze(1).split(widths, dim=-1)

        def mix(qkv: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
            return self._mix(qkv, beta, decay, packed_seq_params)

        if self.recompute and self.training:
            mixed = tensor_parallel.checkpoint(mix, False, qkv, beta, decay)
        else:
            mixed = mix(qkv, beta, decay)
        normed = self.out_norm(mixed, gate.unflatten(-1, (self.heads, -1)))
        output, bias = self.out_proj(normed.flatten(1).unsqueeze(1))
        return output, bias

    def _mix(self, qkv: Tensor, beta: Tensor, decay: Tensor, packed: PackedSequences) -> Tensor:
        """Return ``[T, N, E]`` of this rank's tokens and heads."""
        ways, parts = self.context, packed.parts
        weight = weight_of(self.conv1d).squeeze(1)
        bias: Tensor = self.dt_bias
        rate: Tensor = self.A_log
        lengths: Sequence[int] = packed.lengths
        if ways > 1:
            assert parts is not None
            lengths = parts.lengths
            inputs = [*qkv.split(self.parts, dim=1), beta, decay]
            widths = [x.shape[1] // ways for x in inputs]
            whole = _whole_sequences(inputs, parts, self.context_group)
            qkv, beta, decay = whole.split([sum(widths[:3]), *widths[3:]], dim=1)
            rank = dist.get_rank(self.context_group)
            weight = torch.cat([part.chunk(ways)[rank] for part in weight.split(self.parts)])
            bias, rate = (x.chunk(ways)[rank] for x in (bias, rate))
        g = -rate.float().exp() * F.softplus(decay.float() + bias.float())
        output: Tensor = self.delta_rule(qkv, weight, g, beta.float().sigmoid(), lengths)
        if ways > 1:
            assert parts is not None
            output = _own_tokens(output, parts, self.context_group)
        return output


class _Taps(nn.Module):
    """The weight of a depthwise convolution, in the form that checkpoints have."""

    def __init__(self, channels: int, config: TransformerConfig) -> None:
        super().__init__()
        shape = (channels, 1, config.linear_conv_kernel_dim)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        if config.perform_initialization:
            config.init_method(self.weight)


def _check_heads(config: TransformerConfig, ways: int) -> None:
    """Refuse to divide a head.

    :raises ConfigError: The heads do not divide.
    """
    if config.linear_num_key_heads % ways:
        raise ConfigError(
            f"{config.linear_num_key_heads} key heads of the gated delta net do not divide by "
            f"train.parallel.tensor * train.parallel.context = {ways}.",
            hint=f"Choose a product of the two that divides {config.linear_num_key_heads}.",
        )


# -------------------------------------------------------------------------
# Context parallelism
# -------------------------------------------------------------------------


def _whole_sequences(inputs: Sequence[Tensor], parts: SequenceParts, group: dist.ProcessGroup) -> Tensor:
    """Return the packed sequences with this rank's share of the heads. A collective, in backward too.

    :param inputs: ``[T / C, F]`` each: this rank's tokens with the features of all heads, in their order.
    :returns: ``[T, sum(F) / C]``.
    """
    ways = dist.get_world_size(group)
    by_rank = torch.cat([x.unflatten(1, (ways, -1)) for x in inputs], dim=-1).transpose(0, 1)
    gathered = all_to_all(group, by_rank.flatten(0, 1).contiguous())
    whole: Tensor = gathered.index_select(0, parts.whole_rows.to(gathered.device))
    return whole


def _own_tokens(x: Tensor, parts: SequenceParts, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens with all heads; the inverse of :func:`_whole_sequences`.

    :param x: ``[T, N / C, E]``.
    :returns: ``[T / C, N, E]``.
    """
    rows = torch.empty_like(parts.whole_rows)
    rows[parts.whole_rows] = torch.arange(len(rows))
    gathered = all_to_all(group, x.index_select(0, rows.to(x.device)))
    by_rank: Tensor = gathered.unflatten(0, (dist.get_world_size(group), -1))
    return by_rank.transpose(0, 1).flatten(1, 2)
