"""Agreement among the ranks of a model, and broadcast of results to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.megatron.inputs import MicroBatch
from anygauge.engines.megatron.layers.context_parallel import Cut

__all__ = ["common_count", "from_last_stage", "is_shared", "sum_metrics", "token_cut", "token_slice"]

_METRICS = TypeAdapter(dict[str, float], config=ConfigDict(ser_json_inf_nan="constants"))


def is_shared(group: Any) -> bool:
    """Return whether a group has this rank and others; Megatron has ``None`` or a mark where it has not."""
    return group not in (None, dist.GroupMember.NON_GROUP_MEMBER) and group.size() > 1


def token_cut(config: TransformerConfig) -> Cut:
    """Return how the tokens of a micro-batch are divided, and which part is this rank's."""
    return Cut(
        context=config.context_parallel_size,
        rank=parallel_state.get_context_parallel_rank(),
        tokens=config.tensor_model_parallel_size if config.sequence_parallel else 1,
    )


def token_slice(config: TransformerConfig) -> tuple[int, int]:
    """Return which of how many equal parts of its tokens a rank has in its hidden states."""
    if not config.sequence_parallel:
        return 0, 1
    return parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size


def common_count(count: int, *, config: TransformerConfig, device: torch.device) -> int:
    """Return how many micro-batches this rank must have, if it needs ``count``. A collective.

    Ranks that divide the experts call each other in every layer, so all of them need the same number. The
    interleaved schedule takes micro-batches in groups of a fixed size.
    """
    if config.expert_model_parallel_size * config.expert_tensor_parallel_size > 1:
        most = torch.tensor([count], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, parallel_state.get_data_parallel_group())
        count = int(most.item())
    if config.virtual_pipeline_model_parallel_size is not None:
        group: int = config.microbatch_group_size_per_vp_stage
        count = -(-count // group) * group
    return count


def from_last_stage(
    outputs: Sequence[Tensor],
    batches: Sequence[MicroBatch],
    device: torch.device,
    shape: Sequence[int] = (),
) -> list[Tensor]:
    """Send the last pipeline stage's outputs to every rank. A collective.

    :param outputs: ``[R, *shape]`` for each micro-batch, float32; empty on the other stages.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return list(outputs)
    sizes = [sum(batch.response_lengths) for batch in batches]
    values = torch.cat(list(outputs)) if outputs else torch.empty(sum(sizes), *shape, device=device)
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(values, last, parallel_state.get_pipeline_model_parallel_group())
    return list(values.split(sizes))


def sum_metrics(outputs: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, float]:
    """Return the sums over micro-batches and data-parallel ranks, on every rank. A collective.

    Ranks of one share have the same numbers, and count once.

    :param outputs: For each micro-batch; empty on all pipeline stages but the last.
    """
    names = sorted(outputs[0]) if outputs else []
    assert all(sorted(output) == names for output in outputs), "a loss reports the same metrics each time"
    totals = torch.zeros(len(names), device=device)
    if outputs:
        totals = torch.stack([torch.stack([out[name].float() for name in names]) for out in outputs]).sum(0)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    sums = dict(zip(names, totals.tolist(), strict=True))
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return sums
    return all_gather_values(sums, _METRICS, parallel_state.get_pipeline_model_parallel_group())[-1]
