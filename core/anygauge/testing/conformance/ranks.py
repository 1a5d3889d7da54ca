"""Processes of the backend under test, started as a run starts those that train, which run cases together."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.testing.plugin import NOT_CHECKED
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.types import BackendSpec, Device, LoadedPlugins

__all__ = [
    "SIZES",
    "TIMEOUT_S",
    "Case",
    "CaseWorker",
    "Group",
    "Rank",
    "Ranks",
    "Verdict",
    "make_groups",
    "missing_devices",
    "started",
    "verdict",
]

TIMEOUT_S = 60.0
"""Until torch gives up a collective; a correct one takes milliseconds."""
DEADLINE_S = 120.0
"""Until a case has failed whose ranks do not answer: later than what torch itself has to say."""
ROLE = "actor"

SIZES = (1, 2, 4)
"""Numbers of processes."""
PARTITIONS: Mapping[int, Mapping[str, Sequence[Sequence[int]]]] = {
    1: {"twin": [[0]]},
    2: {"twin": [[1, 0]], "alone": [[0], [1]]},
    4: {"strided": [[0, 2], [1, 3]], "halves": [[0, 1], [2, 3]], "twin": [[2, 3, 1, 0]], "most": [[3, 0, 1]]},
}
"""Groups beside that of all ranks, by the number of ranks. Every rank is in one of each but the last name."""


@dataclass(frozen=True)
class Group:
    """A process group that this rank is in."""

    name: str
    members: Sequence[int]
    """Ranks of all processes, in the group's order."""
    handle: Any

    def __str__(self) -> str:
        return f"group {self.name} of ranks {', '.join(map(str, self.members))}"


@dataclass(frozen=True)
class Rank:
    """One rank, as its cases see it."""

    rank: int
    size: int
    device: Device
    backend: BackendSpec
    plugins: LoadedPlugins
    directory: Path
    """Shared by all ranks."""
    groups: Sequence[Group]


@dataclass(frozen=True)
class Verdict:
    """Result of a case on one rank."""

    complaints: Sequence[str] = ()
    error: str = ""
    """The traceback of an exception."""
    refusal: str = ""
    """The exception, if the case is one that a backend may refuse."""


@dataclass(frozen=True)
class Case:
    """A check that all ranks make together."""

    name: str
    check: Callable[[Rank], Iterator[str]]
    """Yields complaints. It takes part in every collective, whatever it has to complain about."""
    optional: bool = False
    """Whether a backend may refuse it with an error on every rank: no run needs it."""


def verdict(case: Case, rank: Rank) -> Verdict:
    """Run a case on one rank."""
    complaints: list[str] = []
    try:
        complaints += (f"rank {rank.rank}: {complaint}" for complaint in case.check(rank))
    except Exception as error:  # noqa: BLE001 - of the vendor's library; it is the case's verdict
        if case.optional:
            return Verdict(complaints, refusal=f"{type(error).__name__}: {error}".partition("\n")[0])
        return Verdict(complaints, error=f"rank {rank.rank}:\n{traceback.format_exc()}")
    return Verdict(complaints)


def make_groups(rank: int, size: int) -> Iterator[Group]:
    """Make the groups of a world, and yield those that a rank is in."""
    yield Group("world", range(size), dist.group.WORLD)
    for name, parts in PARTITIONS[size].items():
        for members in parts:
            handle: Any = dist.new_group(list(members), timeout=timedelta(seconds=TIMEOUT_S))
            if rank in members:
                yield Group(name, dist.get_process_group_ranks(handle), handle)


class CaseWorker:
    """Runs cases on one rank, in the place of the worker that trains.

    :param directory: A directory that all ranks share.
    """

    def __init__(self, config: Config, context: WorkerContext, *, directory: Path) -> None:
        del config
        rank, size = context.rank, context.world_size
        self._rank = Rank(
            rank=rank,
            size=size,
            device=context.device,
            backend=context.backend,
            plugins=context.plugins,
            directory=directory,
            groups=[*make_groups(rank, size)],
        )

    def run(self, *, case: Case) -> Verdict:
        """Run a case."""
        return verdict(case, self._rank)


@dataclass
class Ranks:
    """Running processes, until a case ends them."""

    group: WorkerGroup
    size: int
    ended_by: str = field(default="", init=False)

    def run(self, case: Case) -> Sequence[Verdict]:
        """Run a case on all ranks.

        A case that hangs or ends a process fails, and so do all after it, which are not run.
        """
        if self.ended_by:
            pytest.fail(f"not run: case {self.ended_by} left these {self.size} processes unusable", False)
        try:
            verdicts: Sequence[Verdict] = self.group.call("run", case=case, timeout_s=DEADLINE_S)
        except AnygaugeError as error:
            self.ended_by = case.name
            pytest.fail(f"{case.name} with {self.size} processes: {error}", pytrace=False)
        failures = [bool(each.error or each.refusal) for each in verdicts]
        if any(failures) and not all(failures):  # some ranks wait for others in vain, or have done so
            self.ended_by = case.name
            self.group.end()
        return verdicts


@contextmanager
def started(plugins: Plugins, backend: BackendSpec, size: int, directory: Path) -> Iterator[Ranks]:
    """Start processes with one device each, joined by the backend's process group.

    Two processes have groups that can be released and made again, as in runs whose trainers and servers
    share devices, if the backend makes communicators. Four have plain ones.
    """
    config = Config.model_validate(
        {
            "run": {"name": "conformance", "steps": 1, "directory": directory, "timeout_s": TIMEOUT_S},
            "model": {"path": directory},
            "data": {"train": []},
            "placement": {"launcher": "local", "threads_per_worker": 1, "colocated": size == 2},
        }
    )
    with launch_workers(
        config,
        backend,
        plugins,
        worker_class=f"{__name__}:{CaseWorker.__name__}",
        role=ROLE,
        run_directory=directory,
        num_workers=size,
        options={"directory": directory},
    ) as group:
        yield Ranks(group, size)


def missing_devices(backend: BackendSpec, size: int) -> str | None:
    """Return why this host cannot give each of so many processes a device, or ``None`` if it can."""
    if backend.device_type == "cpu":
        return None
    count = torch.get_device_module(backend.device_type).device_count()
    if count >= size:
        return None
    return f"{NOT_CHECKED}{size} processes of {backend.name} need {size} devices, and {count} can be seen"
