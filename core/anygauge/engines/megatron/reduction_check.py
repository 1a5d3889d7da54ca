"""Compare gradients before and after their reduction, in the steps that compare replicas.

A reduction that is wrong alike on all ranks leaves every copy equal, and with the distributed optimizer no
rank has a copy of another's gradients. But a reduction is linear: summed over ranks, a weighted sum of all
elements is the same before and after it. Ranks compute both, and exchange them through the rendezvous store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from torch import Tensor

__all__ = ["ReductionCheck", "reduces_over", "weighted_sum", "wrong_sums"]

PERIOD = 1 << 20
"""Elements after which the signs repeat."""
TOLERANCE = {torch.float32: 1e-4}
"""Allowed difference of the sums, as a part of the norms of all ranks' gradients."""
NARROW_TOLERANCE = 2e-2


def reduces_over(group: Any) -> dist.ProcessGroup:
    """Return the ranks over which a bucket group of Megatron reduces gradients."""
    sharded = group.ddp_config.use_distributed_optimizer
    ranks: dist.ProcessGroup = (
        group.intra_distributed_optimizer_instance_group if sharded else group.data_parallel_group
    )
    return ranks


class ReductionCheck:
    """Watches the bucket groups of Megatron's data parallelism.

    Their methods start and finish a reduction during the backward pass, so they are wrapped on each group.

    :param chunks: Chunks that are wrapped for data parallelism.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._groups = [
            group
            for chunk in chunks
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            if reduces_over(group).size() > 1 and group.ddp_config.num_distributed_optimizer_instances == 1
        ]
        self._watches = False
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        for number, group in enumerate(self._groups):
            group.start_grad_sync = partial(self._start, number)
            group.finish_grad_sync = partial(self._finish, number)

    def begin(self, *, watches: bool) -> None:
        """Forget the step before.

        :param watches: Whether this step is compared.
        """
        self._watches = watches
        self._before.clear()
        self._after.clear()

    def _start(self, number: int, *given: Any, **named: Any) -> None:
        group = self._groups[number]
        if self._watches and number not in self._before:
            sums = [
                weighted_sum(bucket.grad_data) * bucket.gradient_scaling_factor for bucket in group.buckets
            ]
            self._before[number] = torch.stack(sums)
        type(group).start_grad_sync(group, *given, **named)

    def _finish(self, number: int, *given: Any, **named: Any) -> None:
        group = self._groups[number]
        type(group).finish_grad_sync(group, *given, **named)
        if self._watches:
            self._after[number] = torch.stack([_result(group, bucket) for bucket in group.buckets])

    def report(self) -> str:
        """Return the sums of this step on this rank, for :func:`wrong_sums`."""
        return json.dumps([*self._sums()])

    def _sums(self) -> Iterator[Sequence[Any]]:
        """Yield what the ranks of each bucket share, and the sums of this rank."""
        for number in sorted(self._after):
            group = self._groups[number]
            ranks, config = dist.get_process_group_ranks(reduces_over(group)), group.ddp_config
            share = len(ranks) if config.average_in_collective else 1
            before = (self._before[number] / share).tolist()
            for place, pair in enumerate(zip(before, self._after[number].tolist(), strict=True)):
                dtype = group.buckets[place].grad_data.dtype
                tolerance = TOLERANCE.get(dtype, NARROW_TOLERANCE)
                yield [number, place, ranks], config.use_distributed_optimizer, tolerance, *pair


def _result(group: Any, bucket: Any) -> Tensor:
    """Return the sum of the reduced gradients that this rank has."""
    if not group.ddp_config.use_distributed_optimizer:
        return weighted_sum(bucket.grad_data)
    ranks = reduces_over(group)
    own = shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()]
    return weighted_sum(own, ranks.rank() * len(own))


@torch.no_grad()
def weighted_sum(values: Tensor, start: int = 0) -> Tensor:
    """Return a weighted sum of elements and their norm, ``[2]``, float32.

    Signs are random, and each period has a factor of its own: elements in other places give another sum.

    :param values: ``[n]``, a part of a buffer.
    :param start: Place of the first element in the buffer.
    """
    signs, total, squares = _signs(values.device), [], []
    place, end = start, start + len(values)
    while place < end:
        number, first = divmod(place, PERIOD)
        size = min(PERIOD - first, end - place)
        part = values[place - start : place - start + size].float()
        total.append(torch.dot(part, signs[first : first + size]) * (1 + number * 0.618034 % 1))
        squares.append(torch.dot(part, part))
        place += size
    if not total:
        return torch.zeros(2, device=values.device)
    return torch.stack((torch.stack(total).sum(), torch.stack(squares).sum().sqrt()))


@lru_cache(maxsize=1)
def _signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2.0 * torch.randint(2, (PERIOD,), generator=generator) - 1).to(device)


def wrong_sums(reports: Sequence[str]) -> str:
    """Return the first bucket that has another sum after its reduction than before it, from all reports."""
    by_bucket: dict[str, list[Any]] = {}
    for report in map(json.loads, reports):
        for key, *sums in report:
            by_bucket.setdefault(json.dumps(key), []).append(sums)
    wrong = []
    for key, each in by_bucket.items():
        number, place, ranks = json.loads(key)
        is_sharded, tolerance = each[0][:2]
        expected = sum(before[0] for *_, before, _ in each)
        limit = tolerance * sum(before[1] for *_, before, _ in each)
        results = [after[0] for *_, after in each]
        results = [sum(results)] if is_sharded else results
        if math.isfinite(expected) and not all(abs(result - expected) <= limit for result in results):
            name = "reduce_scatter" if is_sharded else "all_reduce"
            shown = ", ".join(f"{result:g}" for result in dict.fromkeys(results))
            wrong.append(
                f"{name} of bucket {place} of group {number} over ranks {ranks}: a weighted sum of the "
                f"gradients is {shown} after it, and must be {expected:g} within {limit:.1g}"
            )
    return "; ".join(wrong[:1])
