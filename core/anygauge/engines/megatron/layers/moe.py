"""Mixture of experts: Megatron's layer with a router, experts and a dispatcher that run on every device.

Megatron's own router needs Transformer Engine, its grouped experts a wheel for one vendor's devices, and its
all-to-all dispatcher hands sizes to the host only from that vendor's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, sort_chunks_by_idxs
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from anygauge.engines.megatron.conversion.sharded_experts import sharded_experts
from anygauge.engines.megatron.layers.activation import GatedActivation
from anygauge.engines.megatron.layers.modules import PackedSequences
from anygauge.engines.megatron.weights.sharding import global_expert
from anygauge.kernels.reference import expert_weights
from anygauge.kernels.table import KernelTable

__all__ = [
    "Dispatcher",
    "ExpertLayer",
    "GroupedExperts",
    "GroupedLinear",
    "Router",
    "expert_load",
    "routers",
]


class GroupedLinear(nn.Module):
    """The same linear of every expert of this rank, stored as one tensor ``[E, out, in]``."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        split_dim: int,
        config: TransformerConfig,
        kernels: KernelTable,
    ) -> None:
        super().__init__()
        self.expert_rank = parallel_state.get_expert_model_parallel_rank()
        shape = (experts, out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        if config.perform_initialization:
            config.init_method(self.weight)
        # Without the mark the gradient norm would count rank 0 of the tensor-parallel group alone.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=split_dim + 1, stride=1)
        self.bias: nn.Parameter | None = None
        if config.add_bias_linear:  # Megatron refuses it where ranks divide an expert
            self.bias = nn.Parameter(torch.zeros(shape[:2], dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=1, stride=1)
        for parameter in self.parameters():
            # Megatron sums gradients with this mark over the ranks that hold the same experts.
            parameter.allreduce = not _has_own_ranks(config)  # type: ignore[attr-defined]
        self.kernel = kernels.resolve("grouped_matmul", dtype=config.params_dtype)

    def canonical_tensors(self) -> dict[str, Tensor]:
        """Return views of each expert's tensors, under Transformer Engine's names with its global index."""
        held = len(self.weight)
        return {
            f"{name}{global_expert(local, self.expert_rank, held)}": part
            for name, parameter in self.named_parameters(recurse=False)
            for local, part in enumerate(parameter.detach())
        }

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor | None = None) -> Tensor:
        """Multiply tokens that are sorted by expert, and add the bias of their expert, if there is one.

        :param x: ``[T, in]``.
        :param tokens_per_expert: ``[E]``, int64.
        :param probs: ``[T]``, factors of the biases; ``None`` for 1.
        :returns: ``[T, out]``.
        """
        output: Tensor = self.kernel(x, self.weight, tokens_per_expert)
        if self.bias is None:
            return output
        counts = tokens_per_expert.to(x.device)
        biases = self.bias.repeat_interleave(counts, 0, output_size=len(x))
        return output + (biases if probs is None else biases * probs.unsqueeze(-1)).to(output.dtype)


def _has_own_ranks(config: TransformerConfig) -> bool:
    """Return whether experts are divided over ranks otherwise than the rest of the model."""
    return (
        config.expert_model_parallel_size > 1
        or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )


class GroupedExperts(MegatronModule):
    """Gated MLPs of the experts of this rank."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, kernels: KernelTable, **_: Any
    ) -> None:
        super().__init__(config)
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
        self.linear_fc1 = GroupedLinear(num_local_experts, hidden, 2 * width, 0, config, kernels)
        self.activation_func = GatedActivation(config, kernels)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, hidden, 1, config, kernels)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Run each token through its expert.

        :param x: ``[T, H]``, sorted by expert.
        :param tokens_per_expert: ``[E]``, int64.
        :param probs: ``[T]``, how much each token's expert counts.
        :returns: ``[T, H]``, and no bias.
        """
        inner = self.activation_func(self.linear_fc1(x, tokens_per_expert))
        weighted = (inner * probs.unsqueeze(-1)).to(inner.dtype)
        return self.linear_fc2(weighted, tokens_per_expert, probs), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return these experts for Megatron's dist-checkpoints, with gate and up projections separated."""
        forms = (
            ("linear_fc1.weight", 1, 2),
            ("linear_fc1.bias", 1, 2),
            ("linear_fc2.weight", 2, 1),
            ("linear_fc2.bias", 1, 1),
        )
        tensors = dict(self.named_parameters())
        return {
            f"{prefix}{name}": sharded_experts(
                f"{prefix}experts.{name}", tensors[name], dim, parts, sharded_offsets
            )
            for name, dim, parts in forms
            if name in tensors
        }


class Router(TopKRouter):
    """Chooses the experts of each token; counts how many tokens each expert gets in training."""

    def __init__(self, config: TransformerConfig, kernels: KernelTable, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        counts = torch.zeros(self.num_experts, dtype=torch.int64)
        self.register_buffer("load", counts, persistent=False)
        self.packed: PackedSequences | None = None
        self.weighing: dict[str, Any] = {
            "score_function": config.moe_router_score_function,
            "pre_softmax": config.moe_router_pre_softmax,
            "scaling_factor": config.moe_router_topk_scaling_factor,
        }
        self.groups: dict[str, Any] = {
            "num_groups": config.moe_router_num_groups,
            "group_topk": config.moe_router_group_topk,
        }
        self.kernel = kernels.resolve(
            "topk_router",
            dtype=_router_dtype(config, config.params_dtype),
            experts=self.num_experts,
            topk=self.topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            has_expert_bias=self.enable_expert_bias,
            **self.groups,
        )

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits ``[..., E]`` in the dtype of the router."""
        dtype = _router_dtype(self.config, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weight of each expert ``[T, E]``, and which experts a token goes to, ``[T, E]`` bool.

        Megatron's own would also drop tokens and attach auxiliary losses; the engine refuses configs that
        ask for these.
        """
        logits = logits.view(-1, self.num_experts)
        weights, chosen = self._choose(logits)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, value=True)
        self._count(routing_map)
        return probs, routing_map

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of each token's experts, from or into the micro-batch's routes."""
        routes = None if self.packed is None else self.packed.routes
        assert self.layer_number is not None
        layer = self.layer_number - 1
        if routes is not None and routes.is_replay:
            chosen = routes.take(layer)[self._rows(len(logits))].to(logits.device, torch.int64)
            return expert_weights(logits, chosen, **self.weighing), chosen
        weights, chosen = self.kernel(
            logits, self.topk, **self.weighing, **self.groups, expert_bias=self.expert_bias
        )
        if routes is not None:
            routes.put(layer, self._of_all_rows(chosen))
        return weights, chosen

    def _count(self, routing_map: Tensor) -> None:
        """Count the tokens of each expert, in training alone, each sample's once and padding never."""
        if not torch.is_grad_enabled():
            return
        counts = None if self.packed is None else self.packed.counts
        if counts is not None:
            routing_map = routing_map * counts[self._rows(len(routing_map))].unsqueeze(1)
        load = routing_map.sum(0)
        self.load += load
        if self.enable_expert_bias:
            self.local_tokens_per_expert += load

    def _of_all_rows(self, chosen: Tensor) -> Tensor:
        """Return what was chosen for all tokens of this rank, of which the router sees a part."""
        if not self.config.sequence_parallel:
            return chosen
        parts = [torch.empty_like(chosen) for _ in range(self.tp_group.size())]
        dist.all_gather(parts, chosen.contiguous(), group=self.tp_group)
        return torch.cat(parts)

    def _rows(self, count: int) -> slice:
        """Return which of this rank's tokens are those that the router sees."""
        first = count * self.tp_group.rank() if self.config.sequence_parallel else 0
        return slice(first, first + count)


def _router_dtype(config: TransformerConfig, otherwise: torch.dtype) -> torch.dtype:
    return {"fp32": torch.float32, "fp64": torch.float64}.get(config.moe_router_dtype, otherwise)


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Brings tokens to their experts and back: Megatron's, with the permutations of the kernel table.

    Sizes are on the host on every device; Megatron's own fetches those of CUDA tensors only.
    """

    def __init__(self, *args: Any, config: TransformerConfig, kernels: KernelTable, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        facts = {"dtype": config.params_dtype, "topk": config.moe_router_topk}
        self.permute = kernels.resolve("token_permute", experts=self.num_experts, **facts)
        self.unpermute = kernels.resolve("token_unpermute", **facts)

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens ``[T K, H]`` and their weights ``[T K]``, sorted by expert.

        :param hidden_states: ``[T, 1, H]``.
        :param routing_map: ``[T, E]``, bool.
        :param probs: ``[T, E]``.
        """
        self.hidden_shape = hidden_states.shape
        if probs.dtype == torch.float64:  # of a router in float64; kernels take no such weights
            probs = probs.float()
        self.probs, self.routing_map = probs, routing_map
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        permuted, weights, self.rows = self.permute(tokens, probs, routing_map, self.config.moe_router_topk)
        return permuted, weights

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the tokens of this rank's experts by expert, how many each has, and their weights."""
        tokens, weights = global_input_tokens, global_probs
        if self.tp_size > 1:
            tokens, weights = self._gather(tokens), self._gather(weights)
        counts = self._maybe_dtoh_and_synchronize("before_permutation_2", self.tokens_per_expert)
        if self.num_local_experts > 1:
            sizes = self.num_global_tokens_per_local_expert.ravel()
            order = self.sort_input_by_local_experts
            tokens, weights = sort_chunks_by_idxs(tokens, sizes, order, probs=weights)
        counts = self._maybe_dtoh_and_synchronize("before_finish", counts)
        self.tokens_per_expert = None
        return tokens, counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the outputs of this rank's experts, in the order of their inputs."""
        if self.num_local_experts > 1:
            sizes = self.num_global_tokens_per_local_expert.T.ravel()
            order = self.restore_output_by_local_experts
            hidden_states, _ = sort_chunks_by_idxs(hidden_states, sizes, order)
        if self.tp_size == 1:
            return hidden_states
        summed = self._reduce_scatter(hidden_states.to(self.probs.dtype))  # in the precision of the weights
        return summed.to(hidden_states.dtype)

    def _gather(self, values: Tensor) -> Tensor:
        """Return the values of the tokens of all ranks that divide an expert.

        Megatron gathers tensors of different lengths, which gloo cannot, and other libraries do one by one.
        """
        sizes, longest = self._lengths()
        gathered = gather_from_sequence_parallel_region(_padded(values, longest), group=self.tp_group)
        return torch.cat([part[:size] for part, size in zip(gathered.split(longest), sizes, strict=True)])

    def _reduce_scatter(self, values: Tensor) -> Tensor:
        """Return the sum over these ranks of the values of this rank's tokens."""
        sizes, longest = self._lengths()
        padded = torch.cat([_padded(part, longest) for part in values.split(sizes)])
        summed = reduce_scatter_to_sequence_parallel_region(padded, group=self.tp_group)
        return summed[: sizes[self.tp_rank]]

    def _lengths(self) -> tuple[list[int], int]:
        """Return how many tokens each of these ranks has, and the most, at least 1."""
        sizes: list[int] = self.output_splits_tp.tolist()
        return sizes, max(1, *sizes)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sum ``[T, 1, H]`` of the experts' outputs for each token."""
        return self.unpermute(permutated_local_input_tokens, self.rows).view(self.hidden_shape)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        tokens_per_expert = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                sizes = getattr(self, name)
                setattr(self, name, sizes.cpu().numpy() if torch.is_tensor(sizes) else sizes)
        return tokens_per_expert


def _padded(values: Tensor, length: int) -> Tensor:
    """Return values with rows of zeros at their end."""
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, length - len(values)))


class ExpertLayer(MoELayer):
    """Router, dispatcher, experts and shared expert."""

    moe_layer_recompute: bool
    token_dispatcher: Any

    def __init__(self, *args: Any, dispatcher: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.packed: PackedSequences | None = None
        """The micro-batch of the forward pass that comes next."""
        self._recompute, self.moe_layer_recompute = self.moe_layer_recompute, False
        self.token_dispatcher = dispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=self.config,
            pg_collection=get_default_pg_collection(),
        )

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Send each token through its experts.

        :param hidden_states: ``[T, 1, H]``.
        :returns: ``[T, 1, H]``, and no bias.
        """
        packed, self.packed = self.packed, None

        def run(hidden_states: Tensor) -> Any:
            self.router.packed = packed  # again where the layer is recomputed
            return super(ExpertLayer, self).forward(hidden_states, intermediate_tensors, padding_mask)

        if self._recompute and self.training:
            return tensor_parallel.checkpoint(run, False, hidden_states)
        return run(hidden_states)


def routers(chunks: Sequence[nn.Module]) -> Iterator[Router]:
    """Yield the routers of a rank's model chunks."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Router))


def expert_load(chunks: Sequence[nn.Module], config: TransformerConfig) -> Mapping[str, float]:
    """Return and reset how uneven the experts of each layer were used since the last call. A collective.

    :param chunks: The model chunks of this rank.
    :returns: Tokens of the busiest expert over the mean, for each layer and at most, by metric name.
    """
    if not config.num_moe_experts:
        return {}
    all_routers = list(routers(chunks))
    device = next(chunks[0].parameters()).device
    counts = torch.zeros(config.num_layers, config.num_moe_experts, dtype=torch.float32, device=device)
    for router in all_routers:
        assert router.layer_number is not None
        counts[router.layer_number - 1] = router.load
        router.load.zero_()
    dist.all_reduce(counts)
    means = counts.mean(-1)
    ratios = (counts.amax(-1) / means.clamp(min=1e-9)).tolist()
    used = {layer: ratio for layer, ratio in enumerate(ratios) if means[layer] > 0}
    if not used:
        return {}
    layers = {f"moe/load_max_over_mean/layer_{layer}": ratio for layer, ratio in used.items()}
    return {**layers, "moe/load_max_over_mean": max(used.values())}
