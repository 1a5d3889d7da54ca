"""Cases of collectives: those that training uses, in several groups, with numbers that differ by rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.distributed.process_groups import release_process_groups, reload_process_groups
from anygauge.testing.conformance.ranks import TIMEOUT_S, Case, Rank
from anygauge.testing.conformance.trials import DTYPES, Trial, trials

__all__ = ["CASES"]

Body = Callable[[Trial], None]
PartOf = Callable[[Trial, int], Tensor]

RELOADABLE = "_reloadable"
"""The end of the name of groups that can be released."""
UNEVEN = 3001
"""Elements of a message that no number of ranks divides."""
LATE_S = 0.1
"""How late a rank comes to a barrier. On a busy host a wrong barrier may pass; a right one never fails."""

# -------------------------------------------------------------------------
# Reductions
# -------------------------------------------------------------------------


def all_reduce(op: str, trial: Trial) -> None:
    if op == "AVG" and trial.count == 3:
        return  # thirds are rounded
    own = trial.put(trial.values(trial.me))
    reduce_op = getattr(dist.ReduceOp, op)
    trial.finish(dist.all_reduce(own, reduce_op, group=trial.handle, async_op=trial.asynchronous))
    trial.expect(own, trial.reduced(op), f"all_reduce {op}")


reduce_sum, reduce_max, reduce_min, reduce_avg = (
    partial(all_reduce, op) for op in ("SUM", "MAX", "MIN", "AVG")
)


def reduce(trial: Trial) -> None:
    for root in trial.roots:
        own = trial.put(trial.values(trial.me))
        trial.finish(dist.reduce(own, root, group=trial.handle, async_op=trial.asynchronous))
        if root == trial.rank.rank:  # others are left with anything
            trial.expect(own, trial.reduced("SUM"), f"reduce to rank {root}")


def reduce_scatter_tensor(trial: Trial, op: str = "SUM") -> None:
    if op == "AVG" and trial.count == 3:
        return  # thirds are rounded
    size = trial.size * trial.count
    wanted = trial.reduced(op, size).view(trial.count, -1)[trial.me]
    given, output = trial.put(trial.values(trial.me, size)), trial.room()
    options = {"op": getattr(dist.ReduceOp, op), "group": trial.handle, "async_op": trial.asynchronous}
    trial.finish(dist.reduce_scatter_tensor(output, given, **options))
    trial.expect(output, wanted)
    trial.expect(given, trial.values(trial.me, size), "the input afterwards")
    own = given.view(trial.count, -1)[trial.me]  # where Megatron's gradient buffers take their sums
    trial.finish(dist.reduce_scatter_tensor(own, given, **options))
    trial.expect(own, wanted, "the result in the place of the input")


def reduce_scatter(trial: Trial) -> None:
    size = trial.size * trial.count
    parts = [trial.put(part) for part in trial.values(trial.me, size).view(trial.count, -1)]
    output = trial.room()
    trial.finish(dist.reduce_scatter(output, parts, group=trial.handle, async_op=trial.asynchronous))
    trial.expect(output, trial.reduced("SUM", size).view(trial.count, -1)[trial.me])


# -------------------------------------------------------------------------
# Copies
# -------------------------------------------------------------------------


def broadcast(trial: Trial) -> None:
    for root in trial.roots:
        own = trial.put(trial.values(trial.me))
        trial.finish(dist.broadcast(own, root, group=trial.handle, async_op=trial.asynchronous))
        trial.expect(own, trial.values(trial.members.index(root)), f"broadcast from rank {root}")


def all_gather(trial: Trial) -> None:
    own, parts = trial.put(trial.values(trial.me)), [trial.room() for _ in trial.members]
    trial.finish(dist.all_gather(parts, own, group=trial.handle, async_op=trial.asynchronous))
    for part, member, wanted in zip(parts, trial.members, trial.all_values(), strict=True):
        trial.expect(part, wanted, f"the part of rank {member}")
    trial.expect(own, trial.values(trial.me), "the input afterwards")


def all_gather_into_tensor(trial: Trial) -> None:
    wanted = torch.cat(trial.all_values())
    own, output = trial.put(trial.values(trial.me)), trial.room(trial.size * trial.count)
    options = {"group": trial.handle, "async_op": trial.asynchronous}
    trial.finish(dist.all_gather_into_tensor(output, own, **options))
    trial.expect(output, wanted)
    trial.expect(own, trial.values(trial.me), "the input afterwards")
    output = trial.room(trial.size * trial.count)
    own = output.view(trial.count, -1)[trial.me].copy_(own)  # as Megatron gathers parameters
    trial.finish(dist.all_gather_into_tensor(output, own, **options))
    trial.expect(output, wanted, "the result around the input")


def all_to_all(trial: Trial) -> None:
    size = trial.size * trial.count
    own, output = trial.put(trial.values(trial.me, size)), trial.room(size)
    trial.finish(dist.all_to_all_single(output, own, group=trial.handle, async_op=trial.asynchronous))
    parts = [whole.view(trial.count, -1)[trial.me] for whole in trial.all_values(size)]
    trial.expect(output, torch.cat(parts))
    trial.expect(own, trial.values(trial.me, size), "the input afterwards")


def all_to_all_uneven(trial: Trial) -> None:
    """Exchange parts of which some are empty, as tokens of experts are."""
    sizes = [
        [(1 + sender + 2 * receiver) % 3 * trial.size for receiver in range(trial.count)]
        for sender in range(trial.count)
    ]
    gives, takes = sizes[trial.me], [row[trial.me] for row in sizes]
    own, output = trial.put(trial.values(trial.me, sum(gives))), trial.room(sum(takes))
    work = dist.all_to_all_single(output, own, takes, gives, group=trial.handle, async_op=trial.asynchronous)
    trial.finish(work)
    given = [torch.split(trial.values(member, sum(row)), row) for member, row in enumerate(sizes)]
    trial.expect(output, torch.cat([parts[trial.me] for parts in given]))
    trial.expect(own, trial.values(trial.me, sum(gives)), "the input afterwards")


def gather(trial: Trial) -> None:
    for root in trial.roots:
        own, is_root = trial.put(trial.values(trial.me)), root == trial.rank.rank
        parts = [trial.room() for _ in trial.members] if is_root else None
        trial.finish(dist.gather(own, parts, root, group=trial.handle, async_op=trial.asynchronous))
        for part, wanted in zip(parts or (), trial.all_values(), strict=False):
            trial.expect(part, wanted, f"a part of gather to rank {root}")


def scatter(trial: Trial) -> None:
    size = trial.size * trial.count
    for root in trial.roots:
        given = trial.values(trial.members.index(root), size).view(trial.count, -1)
        parts = [trial.put(part) for part in given] if root == trial.rank.rank else None
        own = trial.room()
        trial.finish(dist.scatter(own, parts, root, group=trial.handle, async_op=trial.asynchronous))
        trial.expect(own, given[trial.me], f"scatter from rank {root}")


# -------------------------------------------------------------------------
# Messages
# -------------------------------------------------------------------------


def send(trial: Trial) -> None:
    """Send two messages to each other rank, which must not overtake one another."""
    for root in trial.roots:
        source = trial.members.index(root)
        wanted = [trial.values(source), trial.values(source, salt=2)]
        for target in trial.members:
            if root == target or trial.rank.rank not in (root, target):
                continue
            if trial.rank.rank == root:
                _transfer(trial, dist.isend, dist.send, [trial.put(numbers) for numbers in wanted], target)
                continue
            messages = [trial.room(), trial.room()]
            _transfer(trial, dist.irecv, dist.recv, messages, root)
            for message, numbers in zip(messages, wanted, strict=True):
                trial.expect(message, numbers, f"a message from rank {root}")


def _transfer(trial: Trial, start: Any, do: Any, messages: Sequence[Tensor], peer: int) -> None:
    call = start if trial.asynchronous else do
    for work in [call(message, peer, group=trial.handle) for message in messages]:
        trial.finish(work)


def batch_isend_irecv(trial: Trial) -> None:
    """Send around a ring, as pipeline stages do."""
    if trial.count == 1:
        return
    before, behind = (trial.me - 1) % trial.count, (trial.me + 1) % trial.count
    own, output = trial.put(trial.values(trial.me)), trial.room()
    operations = [
        dist.P2POp(dist.isend, own, trial.members[behind], trial.handle),
        dist.P2POp(dist.irecv, output, trial.members[before], trial.handle),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    trial.expect(output, trial.values(before))
    trial.expect(own, trial.values(trial.me), "the input afterwards")


# -------------------------------------------------------------------------
# Several at once
# -------------------------------------------------------------------------


def coalesced(trial: Trial) -> None:
    """Gather and reduce several tensors at once, as Megatron does with its buckets."""
    sizes = (trial.size, 2 * trial.size)
    calls: Sequence[tuple[Callable[..., Any], PartOf, PartOf]] = (
        (dist.all_reduce, _owns, _sums),
        (dist.all_gather_into_tensor, _owns, _wholes),
        (dist.reduce_scatter_tensor, _parts, _sums_of_parts),
    )
    for call, given, wanted in calls:
        inputs = [trial.put(given(trial, size)) for size in sizes]
        results = [wanted(trial, size) for size in sizes]
        outputs = inputs if call is dist.all_reduce else [trial.room(len(result)) for result in results]
        with _coalescing(trial.handle, async_ops=trial.asynchronous) as manager:
            for output, tensor in zip(outputs, inputs, strict=True):
                call(*((output,) if output is tensor else (output, tensor)), group=trial.handle)
        trial.finish(manager)
        for output, result in zip(outputs, results, strict=True):
            trial.expect(output, result, f"{call.__name__} of several")


def _owns(trial: Trial, size: int) -> Tensor:
    return trial.values(trial.me, size)


def _sums(trial: Trial, size: int) -> Tensor:
    return trial.reduced("SUM", size)


def _wholes(trial: Trial, size: int) -> Tensor:
    return torch.cat(trial.all_values(size))


def _parts(trial: Trial, size: int) -> Tensor:
    return trial.values(trial.me, size * trial.count)


def _sums_of_parts(trial: Trial, size: int) -> Tensor:
    return trial.reduced("SUM", size * trial.count).view(trial.count, -1)[trial.me]


def _coalescing(group: Any, **options: Any) -> AbstractContextManager[Any]:
    manager: AbstractContextManager[Any] = vars(dist)["_coalescing_manager"](group, **options)
    return manager


def in_flight(rank: Rank) -> Iterator[str]:
    """Start reductions in each group by turns, on inputs that are still being computed; wait in reverse."""
    started = []
    place = rank.device.torch_device
    for number in range(3):
        for group in rank.groups:
            trial = Trial(rank, group, "float32", 5 + number, 1 + 2 * number)
            own = trial.put(torch.zeros(trial.size))
            busy = torch.full((256, 256), 1 / 256, device=place)
            for _ in range(20):
                busy = busy @ busy
            own.copy_(trial.values(trial.me))
            started.append((trial, own, dist.all_reduce(own, group=group.handle, async_op=True)))
    for trial, own, work in reversed(started):
        work.wait()
        trial.expect(own, trial.reduced("SUM"), "one of several all_reduce")
        yield from trial.settle()


def not_finite(rank: Rank) -> Iterator[str]:
    """Reduce infinity and NaN of one rank: a step that overflows on one must be seen on all."""
    for group in rank.groups:
        for number, op in ((math.inf, "SUM"), (math.inf, "MAX"), (-math.inf, "MIN"), (math.nan, "SUM")):
            own = torch.full((5,), number if rank.rank == group.members[-1] else 1.0)
            reduced = own.to(rank.device.torch_device)
            dist.all_reduce(reduced, getattr(dist.ReduceOp, op), group=group.handle)
            if not torch.allclose(reduced.cpu(), torch.full((5,), number), equal_nan=True):
                yield f"{group}: all_reduce {op} of {number} gives {reduced.tolist()}"


def same_bits(rank: Rank) -> Iterator[str]:
    """Sum numbers whose sum is rounded: copies of a model stay equal if all ranks round alike."""
    place = rank.device.torch_device
    for group in rank.groups:
        generator = torch.Generator().manual_seed(rank.rank)
        numbers = torch.randn(UNEVEN, generator=generator)
        for dtype in (torch.float32, torch.bfloat16):
            own = numbers.to(place, dtype)
            dist.all_reduce(own, group=group.handle)
            parts = [torch.empty_like(own) for _ in group.members]
            dist.all_gather(parts, own, group=group.handle)
            others = [m for m, part in zip(group.members, parts, strict=True) if not torch.equal(part, own)]
            if others:
                yield f"{group}: all_reduce of {dtype} gives other bits than on ranks {others}"


def barrier(rank: Rank) -> Iterator[str]:
    """Let a rank come late, and look whether the others go on without it."""
    for group in rank.groups[:2]:
        for late in {group.members[0], group.members[-1]}:
            gone_on = rank.directory / f"gone-on-{group.name}-{group.members[0]}-{late}"
            dist.barrier(group=group.handle)
            if rank.rank != late:
                dist.barrier(group=group.handle)
                rank.device.synchronize()
                gone_on.touch()
                continue
            time.sleep(LATE_S if len(group.members) > 1 else 0)
            if gone_on.exists():
                yield f"{group}: the barrier did not wait for rank {late}"
            dist.barrier(group=group.handle)


def objects(rank: Rank) -> Iterator[str]:
    """Pass objects of different sizes."""
    for group in rank.groups:
        members, handle = group.members, group.handle
        wanted = [{"rank": member, "text": "x" * 700 * member} for member in members]
        own = wanted[members.index(rank.rank)]
        gathered: list[Any] = [None] * len(members)
        dist.all_gather_object(gathered, own, group=handle)
        if gathered != wanted:
            yield f"{group}: all_gather_object: {gathered}"
        for root, expected in zip(members, wanted, strict=True):
            sent = [own if rank.rank == root else None, root]
            dist.broadcast_object_list(sent, root, group=handle)
            if sent != [expected, root]:
                yield f"{group}: broadcast_object_list from rank {root}: {sent}"
            gathered = [None] * len(members)
            dist.gather_object(own, gathered if rank.rank == root else None, root, group=handle)
            if rank.rank == root and gathered != wanted:
                yield f"{group}: gather_object to rank {root}: {gathered}"


# -------------------------------------------------------------------------
# Groups
# -------------------------------------------------------------------------


def timeouts(rank: Rank) -> Iterator[str]:
    """Look at the timeout that the vendor's object has, of the default group and of one that has its own."""
    own = timedelta(seconds=TIMEOUT_S / 2)
    other = dist.new_group(timeout=own)
    for name, group, wanted in (("default", dist.group.WORLD, 2 * own), ("other", other, own)):
        found = _communicator(group, rank).options._timeout
        if found != wanted:
            yield f"the {name} group has a timeout of {found}, and {wanted} was asked for"


def _communicator(group: Any, rank: Rank) -> Any:
    return group._get_backend(rank.device.torch_device)


def reload(rank: Rank) -> Iterator[str]:
    """Release the groups that can be released and make them again: each must get a new communicator.

    Those of one rank stay as they are.
    """
    can_reload = str(dist.get_backend()).endswith(RELOADABLE)
    groups = [group for group in rank.groups if can_reload and group.handle.size() > 1]
    before = [_communicator(group.handle, rank) for group in groups]
    release_process_groups()
    reload_process_groups()
    for group, old in zip(groups, before, strict=True):
        if _communicator(group.handle, rank) is old:
            yield f"{group}: make_communicator returned the object of before the release"
    for trial in trials(rank, "float32", divided=True):
        reduce_sum(trial)
        yield from trial.settle()


# -------------------------------------------------------------------------
# All
# -------------------------------------------------------------------------


def _in_trials(body: Body, dtype: str, divided: bool, rank: Rank) -> Iterator[str]:
    for trial in trials(rank, dtype, divided=divided):
        body(trial)
        yield from trial.settle()


def _of(
    name: str, body: Body, required: Sequence[str], dtypes: Sequence[str], *, divided: bool = True
) -> Iterator[Case]:
    """Yield a case for each dtype.

    :param required: The dtypes that no backend may refuse.
    :param divided: As of :func:`trials`.
    """
    for dtype in dtypes:
        check = partial(_in_trials, body, dtype, divided)
        yield Case(f"{name}-{dtype}", check, optional=dtype not in required)


FLOATS = ("float32", "bfloat16")
NUMBERS = (*FLOATS, "int64")
COPIED = (*NUMBERS, "uint8")
"""One dtype of each width."""

CASES: Sequence[Case] = (
    *_of("all_reduce_sum", reduce_sum, NUMBERS, DTYPES, divided=False),
    *_of("all_reduce_max", reduce_max, NUMBERS, (*NUMBERS, "int32")),
    *_of("all_reduce_min", reduce_min, NUMBERS, (*NUMBERS, "int32")),
    *_of("all_reduce_avg", reduce_avg, (), FLOATS),
    *_of("reduce", reduce, (), NUMBERS),
    *_of("reduce_scatter_tensor", reduce_scatter_tensor, FLOATS, (*NUMBERS, "float16")),
    *_of("reduce_scatter_tensor_avg", partial(reduce_scatter_tensor, op="AVG"), (), FLOATS),
    *_of("reduce_scatter", reduce_scatter, (), FLOATS),
    *_of("broadcast", broadcast, COPIED, DTYPES, divided=False),
    *_of("all_gather", all_gather, COPIED, (*COPIED, "bool", "int32")),
    *_of("all_gather_into_tensor", all_gather_into_tensor, COPIED, (*COPIED, "float16")),
    *_of("all_to_all", all_to_all, COPIED, COPIED),
    *_of("all_to_all_uneven", all_to_all_uneven, COPIED, COPIED),
    *_of("gather", gather, (), FLOATS),
    *_of("scatter", scatter, (), FLOATS),
    *_of("send", send, COPIED, COPIED, divided=False),
    *_of("batch_isend_irecv", batch_isend_irecv, FLOATS, NUMBERS),
    *_of("coalesced", coalesced, FLOATS, FLOATS),
    Case("in_flight", in_flight),
    Case("not_finite", not_finite),
    Case("same_bits", same_bits),
    Case("barrier", barrier),
    Case("objects", objects),
    Case("timeouts", timeouts, optional=True),
    Case("reload", reload),
)
