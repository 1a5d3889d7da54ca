"""Groups that are given up and made again, between threads that are the ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # not listed
    AllreduceOptions,
    HashStore,
    PrefixStore,
    ProcessGroup,
)

from anygauge.distributed.reloadable import ReloadableGroup, ReloadableGroups
from anygauge_cpu.comm import communicator
from anygauge_hooks.errors import AsleepError

WORLD = 2


class Rank:
    """One rank, with two groups of all."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank = rank
        self.groups = ReloadableGroups(PrefixStore("meetings", store), WORLD, timeout_s=30.0)
        self.made = [self.make(name, store) for name in ("first", "second")]

    def make(self, name: str, store: Any) -> ReloadableGroup:
        options = SimpleNamespace(
            store=PrefixStore(name, store),
            group_rank=self.rank,
            group_size=WORLD,
            timeout=timedelta(seconds=30),
        )
        return self.groups.make(communicator, "cpu", "gloo", options, None)

    def collectives(self) -> list[Tensor]:
        """Return what each kind of collective gives this rank, by whichever way torch calls it."""
        group, own = self.made[0], torch.tensor([1.0 + self.rank, 5.0])
        total, gathered, parts = own.clone(), torch.zeros(4), [torch.zeros(2) for _ in range(WORLD)]
        received, scattered, spread = torch.zeros(2), torch.zeros(1), own.clone()
        group.allreduce([total], AllreduceOptions()).wait()
        group._allgather_base(gathered, own).wait()
        group.allgather([parts], [own]).wait()
        group.broadcast(spread, 1).wait()
        group.alltoall_base(received, own, [], []).wait()
        group._reduce_scatter_base(scattered, own, _scattering()).wait()
        peer = 1 - self.rank
        swapped = torch.zeros(2)
        works = [group.send([own], peer, 0), group.recv([swapped], peer, 0)]
        for work in works:
            work.wait()
        group.barrier().wait()
        return [total, gathered, *parts, spread, received, scattered, swapped]


def _scattering() -> Any:
    from torch.distributed import ReduceScatterOptions  # type: ignore[attr-defined]  # not listed

    return ReduceScatterOptions()


def on_both(ranks: list[Rank], work: Callable[[Rank], Any]) -> list[Any]:
    with ThreadPoolExecutor(WORLD) as threads:
        return [each.result(60) for each in [threads.submit(work, rank) for rank in ranks]]


@pytest.fixture
def ranks() -> list[Rank]:
    store = HashStore()
    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(lambda rank: Rank(rank, store), range(WORLD)))


def test_a_group_made_again_computes_what_it_did(ranks: list[Rank]) -> None:
    before = on_both(ranks, Rank.collectives)
    assert before[0][0].tolist() == [3.0, 10.0]
    assert before[0][-1].tolist() == [2.0, 5.0]
    for _ in range(2):
        on_both(ranks, lambda rank: rank.groups.release())
        on_both(ranks, lambda rank: rank.groups.reload())
        after = on_both(ranks, Rank.collectives)
        for one, other in zip(before, after, strict=True):
            assert all(map(torch.equal, one, other))


def test_a_released_group_says_so_and_can_be_ended(ranks: list[Rank]) -> None:
    on_both(ranks, lambda rank: rank.groups.release())
    group = ranks[0].made[1]
    for ask in (
        lambda: group.allreduce([torch.ones(1)]),
        group.barrier,
        lambda: group.send([torch.ones(1)], 1, 0),
    ):
        with pytest.raises(AsleepError, match="which needs a communicator; it has none now"):
            ask()
    assert (group.rank(), group.size(), group._device_types) == (0, 2, [torch.device("cpu")])
    group.shutdown()


def test_nobody_releases_before_all_have_come(ranks: list[Rank]) -> None:
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(ranks[0].groups.release)
        assert ranks[0].made[0].inside("a look") is not None
        assert not first.done()
        ranks[1].groups.release()
        first.result(60)


def test_groups_are_destroyed_at_the_same_time(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for threads of its library; one after the other was half a second for each with NCCL."""
    together, release = Barrier(WORLD * len(ranks[0].made)), ReloadableGroup.release

    def meet_and_release(group: ReloadableGroup) -> None:
        together.wait(60)
        release(group)

    monkeypatch.setattr(ReloadableGroup, "release", meet_and_release)
    on_both(ranks, lambda rank: rank.groups.release())
    with pytest.raises(AsleepError):
        ranks[0].made[0].barrier()


def test_a_group_of_one_rank_stays() -> None:
    store = HashStore()
    groups = ReloadableGroups(store, 1, timeout_s=30.0)
    options = SimpleNamespace(store=store, group_rank=0, group_size=1, timeout=timedelta(seconds=30))
    group = groups.make(communicator, "cpu", "gloo", options, None)
    inside = group.inside("a look")
    groups.release()
    assert group.inside("a look") is inside


def test_torch_knows_a_group_by_its_name(ranks: list[Rank]) -> None:
    """FSDP looks its group up by name."""
    group = ranks[0].made[0]
    group._set_group_name("0")  # as torch does once a group is made
    assert group.group_name == "0"


def test_every_collective_of_torch_is_forwarded() -> None:
    own = {"rank", "size", "name", "boxed", "unbox", "get_group_store", "shutdown", "abort"}
    public = {
        name for name in dir(ProcessGroup) if callable(getattr(ProcessGroup, name)) and name[0].islower()
    }
    assert all(name in vars(ReloadableGroup) for name in public - own)
