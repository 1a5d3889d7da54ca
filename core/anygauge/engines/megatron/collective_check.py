"""Check the process groups of an engine on data whose results are known, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from anygauge.distributed.known_results import GroupUse, check_known_results
from anygauge.engines.megatron.ranks import is_shared
from anygauge.engines.megatron.reduction_check import reduces_over

__all__ = ["check_collectives"]

PART = 1 << 24
"""Elements of a buffer that are filled and compared at once: temporary tensors are that large."""
PERIOD = 251
"""Gradients repeat after so many: a prime, so that no power of two hides a wrong place."""


def check_collectives(
    device: torch.device, chunks: Sequence[Any] = (), optimizer: MegatronOptimizer | None = None
) -> None:
    """Run each collective that an engine uses, and reduce known gradients in its own buffers. A collective.

    :param chunks: Chunks that are wrapped for data parallelism; none of an engine that does not train.
    :raises CollectiveError: A result is wrong; on every rank, with the same text.
    """
    if dist.get_world_size() == 1:
        return
    check_known_results(
        _uses(optimizer), device, lambda: [text for chunk in chunks for text in _wrong_gradients(chunk)]
    )


def _uses(optimizer: MegatronOptimizer | None) -> list[GroupUse]:
    """Return the groups of several ranks that this rank is in, each once."""
    uses: dict[int, GroupUse] = {}
    for use in _all_uses(optimizer):
        if is_shared(use.group):
            uses.setdefault(id(use.group), use)
    return list(uses.values())


def _all_uses(optimizer: MegatronOptimizer | None) -> Iterator[GroupUse]:
    state: Any = parallel_state
    world: Any = dist.group.WORLD
    yield GroupUse("pipeline", state.get_pipeline_model_parallel_group(), messages=True)
    yield GroupUse("expert", state.get_expert_model_parallel_group(), exchanges=True)
    yield GroupUse("context", state.get_context_parallel_group(), exchanges=True)
    yield GroupUse("tensor", state.get_tensor_model_parallel_group())
    yield GroupUse("expert tensor", state.get_expert_tensor_parallel_group())
    yield GroupUse("data", state.get_data_parallel_group())
    yield GroupUse("data and context", state.get_data_parallel_group(with_context_parallel=True))
    yield GroupUse("expert data", state.get_expert_data_parallel_group())
    yield GroupUse("embedding", state.get_embedding_group(check_initialized=False))
    for part in getattr(optimizer, "chained_optimizers", [optimizer]) if optimizer is not None else ():
        yield GroupUse("gradient norm", part.get_grad_stats_parallel_group())
    yield GroupUse("default", world)


# -------------------------------------------------------------------------
# Gradients
# -------------------------------------------------------------------------


def _wrong_gradients(chunk: Any) -> Iterator[str]:
    """Reduce known gradients as a step does: in buffers of their real size, asynchronously if a step does.

    Small messages may be right where large ones are not.
    """
    if chunk.ddp_config.num_distributed_optimizer_instances > 1:
        return  # the buckets of instances are reduced in two groups
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    for group in groups:
        for bucket in group.buckets:
            for values, places in _parts(bucket.grad_data):
                values.copy_(places.mul_(reduces_over(group).rank() + 1))
    if chunk.ddp_config.overlap_grad_reduce:
        chunk.start_grad_sync()
    chunk.finish_grad_sync()
    for group in groups:
        yield from (text for bucket in group.buckets if (text := _wrong_bucket(group, bucket)))
    chunk.zero_grad_buffer()


def _parts(values: Tensor, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a buffer with numbers that say where an element is, for sums that land elsewhere.

    :param start: Place of the first element.
    """
    for first in range(0, len(values), PART):
        part = values[first : first + PART]
        places = torch.arange(start + first, start + first + len(part), device=values.device)
        yield part, places.remainder_(PERIOD).add_(1).float()


def _wrong_bucket(group: Any, bucket: Any) -> str:
    ranks, sharded = reduces_over(group), group.ddp_config.use_distributed_optimizer
    size = ranks.size()
    own = shard_buffer(bucket.grad_data, size)[ranks.rank()] if sharded else bucket.grad_data
    factor = bucket.gradient_scaling_factor * size * (size + 1) / 2
    if group.ddp_config.average_in_collective:
        factor /= size
    start = ranks.rank() * len(own) if sharded else 0
    for values, places in _parts(own, start):
        expected = places.mul_(factor)
        is_wrong = ~((values.float() - expected).abs() <= expected * size * torch.finfo(own.dtype).eps)
        if bool(is_wrong.any()):
            name, first = "reduce_scatter" if sharded else "all_reduce", int(is_wrong.int().argmax())
            return (
                f"{name} of {bucket.grad_data.numel()} gradients ({own.dtype}) over ranks "
                f"{dist.get_process_group_ranks(ranks)}: rank {dist.get_rank()} expected {expected[first]:g} "
                f"and got {values[first]:g}"
            )
    return ""
