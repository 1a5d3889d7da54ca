"""Run the collectives of a group on data whose results are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.distributed.process_groups import host_exchange
from anygauge_hooks.errors import CollectiveError

__all__ = ["GroupUse", "check_known_results", "wrong_result"]

LENGTH = 3
"""Elements for each rank: odd, and few, as some libraries treat few elements apart."""
LARGEST = 251
"""Numbers of elements are below it, so that bfloat16 holds them exactly."""
SHOWN = 6
SHOWN_RANKS = 3
"""Ranks whose results an error has."""
_REPAIR = (
    "The communication library of the backend computes wrongly, or the ranks of the group cannot reach each "
    "other. Nothing was trained. `pytest --pyargs anygauge.testing.conformance` tests the collectives of a "
    "backend; exchange the library or its settings, or leave out the hosts of these ranks."
)
REDUCED = (torch.float32, torch.bfloat16, torch.int64)


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A process group, and which collectives a run calls on it beside reductions and gathers."""

    name: str
    group: dist.ProcessGroup
    exchanges: bool = False
    """All-to-all."""
    messages: bool = False
    """Send and receive, between neighbors."""


Case = tuple[str, Callable[[], Tensor], Tensor]
"""Name, function that runs the collective and returns its result, and the result that is expected."""


def check_known_results(
    uses: Iterable[GroupUse], device: torch.device, others: Callable[[], Sequence[str]] = tuple
) -> None:
    """Run each collective that an engine uses. A collective.

    :param uses: Groups that this rank is in.
    :param others: Runs further collectives, and returns what is wrong with them.
    :raises CollectiveError: A result is wrong; on every rank, with the same text.
    """
    wrong = [*filter(None, [wrong_result(use, device) for use in uses]), *others()]
    mine = wrong[0] if wrong else ""
    told = host_exchange().decide(mine, lambda texts: "; ".join([*filter(None, texts)][:SHOWN_RANKS]))
    if told:
        raise CollectiveError(f"A collective gives a wrong result: {told}.", hint=_REPAIR)


def wrong_result(use: GroupUse, device: torch.device) -> str | None:
    """Return how the first wrong collective of a group differs from what it must give. A collective.

    Every collective runs on every rank, whatever the first ones gave: no rank waits for another.
    """
    wrong = None
    for name, run, expected in _cases(use, device):
        result = run().cpu()
        if wrong is None and not torch.equal(result, expected):
            ranks = dist.get_process_group_ranks(use.group)
            wrong = (
                f"{name} over the {use.name} group of ranks {ranks}: rank {dist.get_rank()} expected "
                f"{_shown(expected)} and got {_shown(result)}"
            )
    return wrong


def _shown(values: Tensor) -> str:
    more = ", ..." if values.numel() > SHOWN else ""
    return f"[{', '.join(f'{value:g}' for value in values.flatten()[:SHOWN].tolist())}{more}]"


def _cases(use: GroupUse, device: torch.device) -> Iterator[Case]:
    for dtype in REDUCED:
        yield from _sums(use.group, device, dtype)
    for dtype in (torch.float32, torch.int64):
        yield _maximum(use.group, device, dtype)
    yield from _gathers(use.group, device)
    yield _broadcast(use.group, device)
    if use.exchanges:
        yield _exchange(use.group, device)
    if use.messages:
        yield _messages(use.group, device)


# -------------------------------------------------------------------------
# Reductions
# -------------------------------------------------------------------------


def _spread(group: dist.ProcessGroup, dtype: torch.dtype, shift: int) -> tuple[Tensor, Tensor]:
    """Return a rank's part of a sum, and the sum.

    Each element comes from one rank and is 0 on the others: exact in every precision and for any number of
    ranks, and wrong if the contribution of a single rank is left out, divided or counted twice.
    """
    places = torch.arange(LENGTH * group.size())
    total = (1 + (7 * places + shift) % 13).to(dtype)
    return torch.where((places + shift) % group.size() == group.rank(), total, 0), total


def _sums(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield sums of the same shape with other data each, since a stale buffer has the shape of the first."""
    kind = str(dtype).removeprefix("torch.")
    for shift, is_async in enumerate((False, True)):
        how = "asynchronous " if is_async else ""
        part, total = _spread(group, dtype, shift)
        yield f"{how}all_reduce (SUM, {kind})", _reduce(part.to(device), group, is_async=is_async), total
        if dtype == torch.int64:  # nothing scatters sums of integers, and not every library can
            continue
        own = total[LENGTH * group.rank() :][:LENGTH]
        yield f"{how}reduce_scatter (SUM, {kind})", _scatter(part.to(device), group, is_async=is_async), own


def _reduce(part: Tensor, group: dist.ProcessGroup, *, is_async: bool) -> Callable[[], Tensor]:
    def run() -> Tensor:
        total = part.clone()
        work = dist.all_reduce(total, group=group, async_op=is_async)
        if work is not None:
            work.wait()
        return total

    return run


def _scatter(part: Tensor, group: dist.ProcessGroup, *, is_async: bool) -> Callable[[], Tensor]:
    def run() -> Tensor:
        own = part.new_zeros(LENGTH)
        work = dist.reduce_scatter_tensor(own, part, group=group, async_op=is_async)
        if work is not None:
            work.wait()
        return own

    return run


def _maximum(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Case:
    places = torch.arange(LENGTH * group.size())
    values = ((places + group.rank()) % group.size() - 1).to(device, dtype)

    def run() -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group)
        return values

    return (
        f"all_reduce (MAX, {str(dtype).removeprefix('torch.')})",
        run,
        torch.full_like(places, group.size() - 2).to(dtype),
    )


# -------------------------------------------------------------------------
# Copies
# -------------------------------------------------------------------------


def _own(rank: int, length: int = LENGTH) -> Tensor:
    """Return data of a rank that no other rank has, in any order."""
    return ((torch.arange(length) + rank * LENGTH) % LARGEST).bfloat16()


def _gathers(group: dist.ProcessGroup, device: torch.device) -> Iterator[Case]:
    own = _own(group.rank()).to(device)
    expected = torch.cat([_own(rank) for rank in range(group.size())])

    def whole() -> Tensor:
        gathered = own.new_zeros(len(expected))
        dist.all_gather_into_tensor(gathered, own, group=group)
        return gathered

    def parts() -> Tensor:
        gathered = [torch.zeros_like(own) for _ in range(group.size())]
        dist.all_gather(gathered, own, group=group)
        return torch.cat(gathered)

    yield "all_gather_into_tensor", whole, expected
    yield "all_gather", parts, expected


def _broadcast(group: dist.ProcessGroup, device: torch.device) -> Case:
    last = group.size() - 1
    values = _own(group.rank()).to(device)

    def run() -> Tensor:
        dist.broadcast(values, dist.get_global_rank(group, last), group)
        return values

    return "broadcast from the last rank", run, _own(last)


def _exchange(group: dist.ProcessGroup, device: torch.device) -> Case:
    """Return an all-to-all in which ranks give each other parts of different lengths."""
    rank, size = group.rank(), group.size()
    lengths = [1 + (rank + other) % 2 for other in range(size)]
    given = torch.cat([_own(rank + other, length) for other, length in enumerate(lengths)]).to(device)
    given = given + rank % 2  # else two ranks would give each other the same
    expected = torch.cat([_own(rank + other, length) + other % 2 for other, length in enumerate(lengths)])

    def run() -> Tensor:
        taken = torch.zeros_like(given)
        dist.all_to_all_single(taken, given, lengths, lengths, group=group)
        return taken

    return "all_to_all_single", run, expected


def _messages(group: dist.ProcessGroup, device: torch.device) -> Case:
    """Return a ring: each rank sends to the next, and receives from the one before."""
    rank, size = group.rank(), group.size()
    given, taken = _own(rank).to(device), torch.zeros(LENGTH, dtype=torch.bfloat16, device=device)
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))

    def run() -> Tensor:
        messages = [
            dist.P2POp(dist.isend, given, after, group),
            dist.P2POp(dist.irecv, taken, before, group),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return taken

    return "send and receive", run, _own((rank - 1) % size)
