"""Rank programs for the tests of replicas, and of collectives that compute wrongly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel_worker import make_samples  # type: ignore[import-not-found]

from anygauge.config import Config
from anygauge.data.batch import mini_batches
from anygauge.distributed.known_results import GroupUse, wrong_result
from anygauge.distributed.layout import layout_of
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches

C10D = "torch.distributed."
GROUPS = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"


def train(config: Config, context: WorkerContext, case: dict[str, Any]) -> list[dict[str, float]]:
    """Take some steps, from one of them on with a fault, on one rank or on all; return the metrics."""
    actor = ActorWorker(config, context)
    metrics = []
    for number, part in enumerate(steps(config, context, case)):
        has_fault = number >= case["since"] and context.rank in case["ranks"]
        with FAULTS[case["fault"]](actor.trainer) if has_fault else nothing():
            metrics += actor.train(part)
    return metrics


def steps(config: Config, context: WorkerContext, case: dict[str, Any]) -> Iterator[Any]:
    layout = layout_of(config)
    plan = batches.plan_samples(make_samples(case["vocab"], 12, 24), 6, layout.data, "sample_mean")
    return mini_batches(plan[layout.dp_rank(context.rank)])


def ask_reference(config: Config, context: WorkerContext, case: dict[str, Any]) -> None:
    """Ask the reference, whose weights change on rank 1 while they are kept."""
    engine: Any = ActorWorker(config, context).trainer
    engine.load_role("reference", case["model"])
    (batch, *_) = steps(config, context, case)
    for number in range(4):
        if context.rank == 1 and number == 1:
            engine._roles._all._kept["reference"][0].view(torch.int32).view(-1)[0] ^= 1
        engine.log_probs(batch, temperature=0.8, role="reference")


def build(config: Config, context: WorkerContext, case: dict[str, Any]) -> None:
    """Build an engine with a fault of a collective."""
    with FAULTS[case["fault"]](None):
        ActorWorker(config, context)


def save(config: Config, context: WorkerContext, case: dict[str, Any]) -> None:
    """Save a checkpoint of the first weights."""
    actor = ActorWorker(config, context)
    actor.save_checkpoint(case["target"])
    while actor.checkpoint_written() is not True:
        time.sleep(0.01)


def resume(config: Config, context: WorkerContext, case: dict[str, Any]) -> None:
    """Load what the ranks find in directories of their own."""
    actor = ActorWorker(config, context)
    actor.load_checkpoint(case["sources"][context.rank])


def known_results(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, str | None]:
    """Return how the known results of the default group are wrong, by the fault of a collective."""
    group: Any = dist.group.WORLD
    use = GroupUse("default", group, exchanges=True, messages=True)
    results = {"none": wrong_result(use, torch.device("cpu"))}
    for name, fault in COLLECTIVES.items():
        with fault(None):
            results[name] = wrong_result(use, torch.device("cpu"))
    return results


# -------------------------------------------------------------------------
# Faults
# -------------------------------------------------------------------------


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def flipped_bit(engine: Any) -> Iterator[None]:
    """Flip a bit of a weight."""
    engine.policy.tensors["decoder.layers.1.mlp.linear_fc1.weight"].view(torch.int32).view(-1)[3] ^= 1
    yield


def wrapped(target: str, change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a fault of a function of collectives: ``change(own, *arguments)`` takes its place."""

    def fault(engine: Any) -> Any:
        own = resolve_name(target)
        return patch(target, lambda *given, **named: change(own, *given, **named))

    return fault


def unreduced(own: Any, tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
    before = tensor.clone()
    work = own(tensor, *rest, **named)
    if work is not None:
        work.wait()
    if tensor.is_floating_point():
        tensor.copy_(before)
    return work


class Done:
    """Work that has ended."""

    def wait(self) -> None:
        """Return at once."""


def gradients_unreduced(own: Any, group: Any, **named: Any) -> None:
    before = [bucket.grad_data.clone() for bucket in group.buckets]
    own(group, **named)
    if group.grad_reduce_handle is not None:
        group.grad_reduce_handle.wait()
        group.grad_reduce_handle = Done()
    for bucket, values in zip(group.buckets, before, strict=True):
        bucket.grad_data.copy_(values)


def changed_sums(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Reduce wrongly in the same way on all ranks, so that no copy differs."""

    def changed(own: Any, group: Any, **named: Any) -> None:
        own(group, **named)
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = Done()
        for bucket in group.buckets:
            bucket.grad_data.copy_(change(bucket.grad_data))

    return changed


def one_place_on(sums: torch.Tensor) -> torch.Tensor:
    """Put sums into other places of the shard that they belong to."""
    return torch.cat([part.roll(1) for part in sums.chunk(dist.get_world_size())])


def weights_of_own_part(own: Any, group: Any, **named: Any) -> None:
    own(group, **named)
    rank, size = dist.get_rank(), dist.get_world_size()
    for bucket in group.buckets:
        parts = bucket.param_data.view(size, -1)
        parts.copy_(parts[rank].clone())


def norms_unreduced(own: Any, tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """Reduce no gradients of norms: those that ranks of tensor parallelism sum."""
    from megatron.core import parallel_state

    is_tensor = named.get("group") is parallel_state.get_tensor_model_parallel_group()
    function = unreduced if is_tensor and tensor.dim() == 1 else lambda own, *x, **y: own(*x, **y)
    return function(own, tensor, *rest, **named)


def own_part(own: Any, output: torch.Tensor, part: torch.Tensor, **named: Any) -> Any:
    mine = part.clone()
    work = own(output, part, **named)
    output.view(-1, len(mine)).copy_(mine)
    return work


def unscattered(own: Any, output: torch.Tensor, given: torch.Tensor, **named: Any) -> Any:
    mine = given.view(dist.get_world_size(named.get("group")), -1)[dist.get_rank(named.get("group"))].clone()
    work = own(output, given, **named)
    if work is not None:
        work.wait()
    output.copy_(mine.view_as(output))
    return work


def first_parts(own: Any, parts: list[torch.Tensor], *rest: Any, **named: Any) -> None:
    own(parts, *rest, **named)
    for part in parts[1:]:
        part.copy_(parts[0])


def from_first(own: Any, tensor: torch.Tensor, source: int, group: Any) -> None:
    own(tensor, dist.get_global_rank(group, 0), group)


def reversed_parts(own: Any, taken: torch.Tensor, *rest: Any, **named: Any) -> None:
    own(taken, *rest, **named)
    taken.copy_(taken.flip(0))


def summed(own: Any, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *rest: Any, **named: Any) -> Any:
    return own(tensor, dist.ReduceOp.SUM, *rest, **named)


def stale() -> Callable[..., Any]:
    results: dict[Any, torch.Tensor] = {}

    def change(own: Any, tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        work = own(tensor, *rest, **named)
        if work is not None:
            work.wait()
        tensor.copy_(results.setdefault((tensor.dtype, tensor.shape), tensor.clone()))
        return work

    return change


def unreceived(own: Any, messages: Any) -> Any:
    before = [each.tensor.clone() for each in messages]
    works = own(messages)
    for work in works:
        work.wait()
    for message, values in zip(messages, before, strict=True):
        message.tensor.copy_(values)
    return []


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": wrapped(f"{C10D}all_reduce", unreduced),
    "stale": wrapped(f"{C10D}all_reduce", stale()),
    "MAX": wrapped(f"{C10D}all_reduce", summed),
    "reduce_scatter": wrapped(f"{C10D}reduce_scatter_tensor", unscattered),
    "all_gather_into_tensor": wrapped(f"{C10D}all_gather_into_tensor", own_part),
    "all_gather": wrapped(f"{C10D}all_gather", first_parts),
    "broadcast": wrapped(f"{C10D}broadcast", from_first),
    "all_to_all_single": wrapped(f"{C10D}all_to_all_single", reversed_parts),
    "send and receive": wrapped(f"{C10D}batch_isend_irecv", unreceived),
}
FAULTS: dict[str, Callable[[Any], Any]] = {
    **COLLECTIVES,
    "flipped": flipped_bit,
    "gradients": wrapped(f"{GROUPS}.start_grad_sync", gradients_unreduced),
    "misplaced": wrapped(f"{GROUPS}.start_grad_sync", changed_sums(one_place_on)),
    "halved": wrapped(f"{GROUPS}.start_grad_sync", changed_sums(lambda sums: sums / 2)),
    "norms": wrapped(f"{C10D}all_reduce", norms_unreduced),
    "gathered": wrapped(f"{GROUPS}.start_param_sync", weights_of_own_part),
}
