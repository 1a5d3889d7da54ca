"""Check the process groups of an engine on data whose results are known, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer import MegatronOptimizer

from anygauge.distributed.known_results import GroupUse, wrong_result
from anygauge.distributed.process_groups import host_exchange
from anygauge.engines.megatron.ranks import is_shared
from anygauge_hooks.errors import CollectiveError

__all__ = ["check_collectives"]

SHOWN = 3
"""Ranks whose results an error has."""
_REPAIR = (
    "The communication library of the backend computes wrongly, or the ranks of the group cannot reach each "
    "other. Nothing was trained. `pytest --pyargs anygauge.testing.conformance` tests the collectives of a "
    "backend; exchange the library or its settings, or leave out the hosts of these ranks."
)


def check_collectives(
    device: torch.device, chunks: Sequence[Any] = (), optimizer: MegatronOptimizer | None = None
) -> None:
    """Run each collective that an engine uses, and reduce known gradients in its own buffers. A collective.

    :param chunks: Chunks that are wrapped for data parallelism; none of an engine that does not train.
    :raises CollectiveError: A result is wrong; on every rank, with the same text.
    """
    if dist.get_world_size() == 1:
        return
    wrong = [wrong_result(use, device) for use in _uses(optimizer)]
    for chunk in chunks:
        wrong += _wrong_gradients(chunk)
    mine = next(filter(None, wrong), "")
    told = host_exchange().decide(mine, lambda texts: "; ".join(list(filter(None, texts))[:SHOWN]))
    if told:
        raise CollectiveError(f"A collective gives a wrong result: {told}.", hint=_REPAIR)


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
            bucket.grad_data.fill_(_ranks_of(group).rank() + 1)
    if chunk.ddp_config.overlap_grad_reduce:
        chunk.start_grad_sync()
    chunk.finish_grad_sync()
    for group in groups:
        yield from (text for bucket in group.buckets if (text := _wrong_bucket(group, bucket)))
    chunk.zero_grad_buffer()


def _ranks_of(group: Any) -> dist.ProcessGroup:
    sharded = group.ddp_config.use_distributed_optimizer
    ranks: dist.ProcessGroup = (
        group.intra_distributed_optimizer_instance_group if sharded else group.data_parallel_group
    )
    return ranks


def _wrong_bucket(group: Any, bucket: Any) -> str:
    ranks, sharded = _ranks_of(group), group.ddp_config.use_distributed_optimizer
    size = ranks.size()
    own = shard_buffer(bucket.grad_data, size)[ranks.rank()] if sharded else bucket.grad_data
    expected = bucket.gradient_scaling_factor * size * (size + 1) / 2
    if group.ddp_config.average_in_collective:
        expected /= size
    rounding = expected * size * torch.finfo(own.dtype).eps
    least, most = torch.stack(own.aminmax()).tolist()
    if expected - rounding <= least <= most <= expected + rounding:
        return ""
    name = "reduce_scatter" if sharded else "all_reduce"
    return (
        f"{name} of {bucket.grad_data.numel()} gradients ({own.dtype}) over ranks "
        f"{dist.get_process_group_ranks(ranks)}: rank {dist.get_rank()} expected {expected:g} everywhere and "
        f"got {least:g} to {most:g}"
    )
