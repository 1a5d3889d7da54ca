"""The backend's ``torch.distributed`` backend carries the collectives that training uses, with one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed

from anygauge.distributed.process_groups import (
    HOST_BACKEND,
    SERIAL_HOST_BACKEND,
    destroy_process_group,
    init_process_group,
)
from anygauge.kernels.table import KernelTable
from anygauge.plugins import Plugins
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def world(plugins: Plugins, backend: BackendSpec, device: Device) -> Iterator[None]:
    store = TCPStore("127.0.0.1", 0, is_master=True)  # port 0: the system picks a free one
    init_process_group(plugins, backend, store, rank=0, world_size=1, timeout_s=TIMEOUT_S, single_host=True)
    yield
    destroy_process_group()


@pytest.fixture
def numbers(world: None, device: Device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.float32, device=device.torch_device)


def test_group_has_the_backend(world: None, backend: BackendSpec) -> None:
    ours = SERIAL_HOST_BACKEND if backend.dist_backend == HOST_BACKEND else backend.dist_backend
    assert dist.get_backend() == ours
    assert dist.get_world_size() == 1


@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN"])
def test_all_reduce(numbers: torch.Tensor, op: str) -> None:
    reduced = numbers.clone()
    dist.all_reduce(reduced, getattr(dist.ReduceOp, op))
    assert torch.equal(reduced, numbers)


def test_all_reduce_of_bfloat16(numbers: torch.Tensor) -> None:
    reduced = numbers.bfloat16()
    dist.all_reduce(reduced)
    assert torch.equal(reduced.float(), numbers)


def test_broadcast(numbers: torch.Tensor) -> None:
    sent = numbers.clone()
    dist.broadcast(sent, src=0)
    assert torch.equal(sent, numbers)


# torch 2.13 deprecates the names that Megatron calls and that 2.10 has
@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
def test_all_gather_and_reduce_scatter(numbers: torch.Tensor) -> None:
    gathered, scattered = torch.empty_like(numbers), torch.empty_like(numbers)
    dist.all_gather_into_tensor(gathered, numbers)
    dist.reduce_scatter_tensor(scattered, numbers)
    assert torch.equal(gathered, numbers)
    assert torch.equal(scattered, numbers)


def test_all_to_all(numbers: torch.Tensor) -> None:
    received = torch.empty_like(numbers)
    dist.all_to_all_single(received, numbers)
    assert torch.equal(received, numbers)


def test_asynchronous_work_completes(numbers: torch.Tensor) -> None:
    reduced = numbers.clone()
    work = dist.all_reduce(reduced, async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(reduced, numbers)


@pytest.mark.filterwarnings("ignore:barrier:UserWarning")  # the device is the current one, as it guesses
def test_barrier_and_objects(world: None) -> None:
    dist.barrier()
    gathered: list[object] = [None]
    dist.all_gather_object(gathered, {"rank": 0})
    assert gathered == [{"rank": 0}]


def test_subgroup(numbers: torch.Tensor) -> None:
    group = dist.new_group([0])
    reduced = numbers.clone()
    dist.all_reduce(reduced, group=group)
    assert torch.equal(reduced, numbers)


def test_vocab_parallel_logprob_of_one_rank_needs_no_group(
    numbers: torch.Tensor, kernels: KernelTable
) -> None:
    logprob = kernels.resolve("vocab_parallel_logprob", dtype=torch.float32)
    logits, targets = numbers.repeat(3, 1), torch.tensor([0, 3, 7], device=numbers.device)
    alone = logprob(logits.clone(), targets, 0.5, None, entropy_grad=False)
    grouped = logprob(logits.clone(), targets, 0.5, dist.group.WORLD, entropy_grad=False)
    torch.testing.assert_close(grouped, alone)
