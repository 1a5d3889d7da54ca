"""Collectives of two ranks on two simulated NPUs. Run by ``test_simulation.py``, inside the launcher.

python two_ranks.py collectives.py    each rank prints a line with what it found
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch_npu._C._distributed_c10d import ProcessGroupHCCL

from simulation.simulated import install

RANKS = 2
ROOT_INFO_BYTES = 4108
SUM, FLOAT32 = 0, 4
"""HCCL's numbers."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)
Case = Callable[[str, int], list[Tensor]]


def main() -> None:
    """Run one rank and print its report."""
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    install()
    dist.init_process_group(
        "cpu:gloo,npu:hccl",
        init_method=f"file://{os.environ['STORE']}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=30),
    )
    report = {
        "compared": compare(rank),
        "not numbers": not_numbers(rank),
        "again": made_again(rank),
        "asked": options(rank),
        "errors": errors(rank),
    }
    sys.stdout.write(f"REPORT {json.dumps([rank, report])}\n")
    sys.stdout.flush()
    os._exit(0)  # a group that has failed is not waited for


def compare(rank: int) -> dict[str, list[str]]:
    """Run every collective over HCCL and over gloo, and name those whose bits are equal, and the others."""
    found: dict[str, list[str]] = {"equal": [], "differ": []}
    for name, case in cases():
        host, npu = case("cpu", rank), case("npu", rank)
        same = all(torch.equal(one, other.cpu()) for one, other in zip(host, npu, strict=True))
        found["equal" if same and all(x.device.index == rank for x in npu) else "differ"].append(name)
    return found


def values(device: str, rank: int, dtype: torch.dtype, size: int = 1003) -> Tensor:
    """Return numbers that differ by rank, and whose sums are rounded; no whole blocks of them."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(size, generator=generator) * 5 if dtype in FLOATS else torch.arange(size) % 9 + rank
    return numbers.to(dtype).to(device)


def cases() -> Iterator[tuple[str, Case]]:
    """Yield collectives as functions of device and rank that return what the rank has afterwards."""
    for dtype in TYPES:
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN):
            yield f"all_reduce {op} {dtype}", reduces(dtype, op)
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64):
        yield f"all_reduce product {dtype}", reduces(dtype, ReduceOp.PRODUCT)
    for dtype in (*TYPES, torch.float64, torch.bool):
        for name, function in COPIES.items():
            yield f"{name} {dtype}", lambda device, rank, f=function, d=dtype: f(device, rank, d)
    for dtype in FLOATS:
        yield f"mean {dtype}", lambda device, rank, d=dtype: [mean(device, rank, d)]
        for name, function in SUMS.items():
            yield f"{name} {dtype}", lambda device, rank, f=function, d=dtype: f(device, rank, d)
    yield "objects", objects


def reduces(dtype: torch.dtype, op: Any) -> Case:
    def case(device: str, rank: int) -> list[Tensor]:
        reduced = values(device, rank, dtype)
        dist.all_reduce(reduced, op)
        return [reduced]

    return case


def mean(device: str, rank: int, dtype: torch.dtype) -> Tensor:
    """Let HCCL take the mean; gloo has none, and halving is exact."""
    reduced = values(device, rank, dtype)
    dist.all_reduce(reduced, ReduceOp.SUM if device == "cpu" else ReduceOp.AVG)
    return reduced / 2 if device == "cpu" else reduced


def broadcast(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    sent = values(device, rank, dtype)
    dist.broadcast(sent, src=1)
    return [sent]


def gathered(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    own = values(device, rank, dtype)
    found = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(found, own)
    whole = torch.empty(RANKS * own.numel(), dtype=dtype, device=device)
    part = whole[rank * own.numel() :][: own.numel()].copy_(own)
    dist.all_gather_into_tensor(whole, part)  # in place, as a DistributedOptimizer gathers parameters
    return [*found, whole]


def gathered_unevenly(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    own = values(device, rank, dtype)[: 5 + 3 * rank]
    found = [torch.empty(5 + 3 * source, dtype=dtype, device=device) for source in range(RANKS)]
    if device == "cpu":
        return [values(device, source, dtype)[: 5 + 3 * source] for source in range(RANKS)]  # gloo cannot
    dist.all_gather(found, own)
    return found


def scattered(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    found = values(device, rank, dtype)
    parts = [values(device, 5 + target, dtype) for target in range(RANKS)] if rank == 0 else None
    dist.scatter(found, parts, src=0)
    return [found]


def exchanged(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    own = values(device, rank, dtype)[:1000]
    even, uneven = torch.empty_like(own), torch.empty(700 + 100 * rank, dtype=dtype, device=device)
    dist.all_to_all_single(even, own)
    sent, taken = ([300, 700], [300, 400]) if rank == 0 else ([400, 100], [700, 100])
    dist.all_to_all_single(uneven, own[: sum(sent)], taken, sent)
    return [even, uneven]


def passed_on(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    own = values(device, rank, dtype)
    first, second = torch.empty_like(own), torch.empty_like(own)
    transfers = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, first, 1 - rank)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    if rank == 0:
        dist.send(own, 1)
        return [first]
    dist.recv(second, 0)
    return [first, second]


def scattered_sums(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    own = values(device, rank, dtype)[:1000]
    found = torch.empty(500, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(found, own)
    return [found]


def reduced_to_one(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    own = values(device, rank, dtype)
    dist.reduce(own, dst=1)
    return [own] if rank == 1 else []  # what the others are left with is nobody's business


def in_a_group(device: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    both, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(RANKS)]
    own = values(device, rank, dtype)
    dist.all_reduce(own, group=alone[rank])
    work = dist.all_reduce(own, group=both, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier(group=both)
    return [own]


def objects(device: str, rank: int) -> list[Tensor]:
    found: list[Any] = [None] * RANKS
    with torch.device(device):
        dist.all_gather_object(found, {"rank": rank, "text": "x" * (1 + 700 * rank)})
    return [torch.tensor([each["rank"] + len(each["text"]) for each in found], device=device)]


COPIES = {
    "broadcast": broadcast,
    "all_gather": gathered,
    "all_gather uneven": gathered_unevenly,
    "scatter": scattered,
    "all_to_all": exchanged,
    "send and recv": passed_on,
}
SUMS = {"reduce_scatter": scattered_sums, "reduce": reduced_to_one, "groups": in_a_group}


def not_numbers(rank: int) -> list[str]:
    """Name the reductions that lose what is not a number, whichever rank has it."""
    lost = []
    for dtype in FLOATS:
        for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.SUM):
            values = torch.ones(2, dtype=dtype)
            values[rank] = torch.nan
            reduced = values.to("npu")
            dist.all_reduce(reduced, op)
            if not reduced.isnan().all():
                lost.append(f"{op} {dtype}: {reduced.tolist()}")
    return lost


def made_again(rank: int) -> list[float]:
    """Return the sums of two groups with one id, of which the second is made when the first has gone.

    HCCL is called itself: torch-npu chooses ids that differ.
    """
    hccl = ctypes.CDLL("libhccl.so")
    info = ctypes.create_string_buffer(ROOT_INFO_BYTES)
    if rank == 0:
        hccl.HcclGetRootInfo(info)
    sent = [info.raw]
    dist.broadcast_object_list(sent, 0, device=torch.device("cpu"))
    parent, group = ctypes.c_void_p(), ctypes.c_void_p()
    assert hccl.HcclCommInitRootInfo(RANKS, sent[0], rank, ctypes.byref(parent)) == 0
    members, found = (ctypes.c_uint32 * RANKS)(*range(RANKS)), []
    for value in (1.0, 10.0):
        made = (ctypes.c_uint64(7), rank, None, ctypes.byref(group))
        assert hccl.HcclCreateSubCommConfig(ctypes.byref(parent), RANKS, members, *made) == 0
        time.sleep(0.3 * rank)  # the first rank must wait for this one, not find what it gave to the other
        given, summed = torch.tensor(value), torch.tensor(0.0)
        addresses = (ctypes.c_void_p(x.data_ptr()) for x in (given, summed))
        assert hccl.HcclAllReduce(*addresses, ctypes.c_uint64(1), FLOAT32, SUM, group, None) == 0
        found.append(summed.item())
        hccl.HcclCommDestroy(group)
    return found


def options(rank: int) -> list[dict[str, Any]]:
    """Return what HCCL was asked for by this process when it made a group with options."""
    chosen = ProcessGroupHCCL.Options()
    chosen.hccl_config = {"hccl_buffer_size": 123, "group_name": "weights"}
    group = dist.new_group([0, 1], backend="hccl", pg_options=chosen)
    dist.all_reduce(torch.ones(4, device="npu"), group=group)
    lines = Path(os.environ["SIMULATED_NPU_SCRATCH"], "groups.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{**each, "pid": None} for each in found if each["pid"] == os.getpid()]


def errors(rank: int) -> dict[str, str]:
    """Return the errors of what HCCL does not reduce, of ranks that disagree, and of one that never comes."""
    small, large = torch.ones(1024, device="npu"), torch.ones(2048, device="npu")
    calls: dict[str, Callable[[], Any]] = {
        "float64": lambda: dist.all_reduce(small.double()),
        "product": lambda: dist.all_reduce(small.bfloat16(), ReduceOp.PRODUCT),
        "sizes": lambda: dist.all_reduce(large if rank else small),
        "types": lambda: dist.all_reduce(small.int() if rank else small),
        "operations": lambda: dist.broadcast(small, 0) if rank else dist.all_reduce(small),
        "reductions": lambda: dist.all_reduce(small, ReduceOp.MAX if rank else ReduceOp.SUM),
        "roots": lambda: dist.broadcast(small, rank),
        "parts": lambda: dist.all_to_all_single(small, small, None, [1000, 24] if rank else [512, 512]),
        "none": lambda: dist.all_reduce(small),
        "absent": lambda: None if rank else waits(lambda: dist.all_reduce(small)),
    }
    return {name: error(call) for name, call in calls.items()}


def waits(call: Callable[[], Any]) -> None:
    """Call what waits for another rank in vain, with less patience."""
    os.environ["SIMULATED_NPU_TIMEOUT_S"] = "2"
    call()


def error(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as raised:
        return str(raised)
    return "no error"


if __name__ == "__main__":
    main()
