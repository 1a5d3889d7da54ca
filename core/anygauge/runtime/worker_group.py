"""Worker group: the driver's calls to its workers, with deadlines and one error for any failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from anygauge.config.schema import Config
from anygauge.runtime.cluster import (
    ClusterNode,
    GroupRendezvous,
    NodeFacts,
    check_nodes,
    is_one_plain_host,
    make_rendezvous,
    marker_file,
    model_paths,
    node_facts,
    saves,
)
from anygauge.runtime.memory_advice import advise_death
from anygauge.runtime.placement import Seat, shared_seats
from anygauge.runtime.rpc import (
    Died,
    MethodCall,
    Raised,
    Returned,
    WorkerId,
    deadline_error,
    decode,
    encode,
    error_of,
)
from anygauge.runtime.worker import HostInfo, WorkerSetup
from anygauge_hooks.errors import WorkerDiedError
from anygauge_hooks.resources import read_oom_kills
from anygauge_hooks.types import BackendSpec

__all__ = ["Arguments", "LaunchSpec", "PendingCall", "Transport", "Watch", "WorkerGroup"]

_log = logging.getLogger(__name__)

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a call."""
Watch = Callable[[str, int, int], None]
"""Called with a method's name, the number of workers that have answered, and that of all."""
GRACE_S = 0.5
"""For the failures of other ranks to arrive, after one that looks like nobody's consequence."""
CLOSE_TIMEOUT_S = 10.0
"""For every worker to close what it holds, in an orderly shutdown."""
WATCH_S = 1.0
"""Interval at which a watch is called while no worker answers."""
CLOSE = "close"
"""The last call, after which a worker exits."""

MAX_STACKS = 8
"""Workers whose stacks a missed deadline shows: the rest wait in the same places."""
CALL_SETTING = "run.timeout_s"
START_SETTING = "placement.start_timeout_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """A group of workers to start."""

    config: Config
    backend: BackendSpec
    worker_class: str
    """``"package.module:Class"``."""
    role: str
    num_workers: int
    run_directory: Path
    """Absolute."""
    env: Mapping[str, str]
    """Added to the environment of each worker."""
    plugins: Sequence[str] = ()
    """Entry points that every worker must have."""
    collective: bool = True
    """Whether the workers form a process group; those that train do."""
    first_device: int = 0
    """Index of the role's first device on a host, where workers are plain processes and share the host with
    another role's."""
    devices: int = 1
    """Devices that each worker takes."""
    seats: Sequence[Seat] = ()
    """Placements of workers that use devices of other workers and none of their own."""
    extra_devices: int = 0
    """Devices that workers of other roles will take."""
    reads: Sequence[Path] = ()
    """Directories that every worker needs, beside those that the config names."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class."""
    computes: bool = True
    """Whether the workers compute on their devices. Others import no torch before their object is made."""

    def log(self, rank: int) -> Path:
        """Return the file that a worker's output goes to."""
        return self.run_directory / "logs" / f"{self.role}-{rank}.log"

    def setup(self, rank: int) -> WorkerSetup:
        """Return the setup of a rank's worker."""
        return WorkerSetup(
            config=self.config,
            backend=self.backend.name,
            worker_class=self.worker_class,
            role=self.role,
            rank=rank,
            world_size=self.num_workers,
            log=str(self.log(rank)),
            run_directory=str(self.run_directory),
            timeout_s=self.config.run.timeout_s,
            plugins=self.plugins,
            first_device=self.first_device,
            devices=self.devices,
            accelerators=self.seats[rank].accelerators if self.seats else None,
            options=self.options,
            computes=self.computes,
        )


class Transport(Protocol):
    """Running worker processes, and a way to exchange messages with them."""

    death_grace_s: float
    """How long after an error that it caused elsewhere the news of a process's death may arrive."""
    driver_node: str
    """The node of this process, as :class:`HostInfo` names nodes."""
    cluster: str
    """The Ray cluster that the workers share with others, for people; empty without one."""

    def send(self, rank: int, message: bytes) -> None:
        """Send a request. A process that has died is reported by :meth:`wait`."""

    def wait(self, timeout_s: float) -> Mapping[int, bytes | Died]:
        """Return replies and deaths once there are any; empty at the deadline. Each death comes once."""

    def located(self, hosts: Sequence[HostInfo]) -> None:
        """Learn where the workers run; from now on they can be asked for their stacks."""

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return the thread stacks of running workers, by rank; empty before they were located."""

    def end(self, *, orderly: bool) -> None:
        """End every process, and return when all are gone.

        :param orderly: The workers were closed and exit by themselves; give them a moment.
        """


class PendingCall:
    """A call that every worker is working on."""

    def __init__(self, group: WorkerGroup, method: str, timeout_s: float, setting: str) -> None:
        self._group = group
        self._method = method
        self._timeout_s = timeout_s
        self._setting = setting

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for every worker and return the results by rank.

        :param timeout_s: ``None`` takes the call's own.
        :raises WorkerFailedError: A worker raised; the group is ended.
        :raises WorkerDiedError: A worker process ended; the group is ended.
        :raises DeadlineError: Not every worker answered in time; the group is ended.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return self._group._gather(self._method, limit_s, self._setting)


class _BringUp(NamedTuple):
    """Workers that come up: a call that they work on, and what the next one needs."""

    pending: PendingCall
    rendezvous: GroupRendezvous | None


class WorkerGroup:
    """Workers that answer calls together. Ended by the first error, and by leaving its ``with`` block."""

    def __init__(self, transport: Transport, spec: LaunchSpec) -> None:
        self._transport = transport
        self._spec = spec
        self._ranks = range(spec.num_workers)
        self._who = {rank: WorkerId(role=spec.role, rank=rank) for rank in self._ranks}
        self._pending: set[int] = set()
        self._ended = False
        self._oom_kills = read_oom_kills()
        self._hosts: Sequence[HostInfo] = ()
        self._before_call: Callable[[str], None] | None = None
        self._watch: Watch | None = None
        self._preparing: _BringUp | None = None
        self._connecting: PendingCall | None = None
        self._begun = False

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.end()

    @property
    def workers(self) -> list[WorkerId]:
        """The workers, by rank."""
        return [self._who[rank] for rank in self._ranks]

    def seats(self, count: int, devices: int) -> list[Seat]:
        """Return places on the devices of these workers, in the order of ranks.

        :param devices: Number of devices for each place.
        :raises PlacementError: The devices of one are on more than one node.
        """
        self.begin()
        return shared_seats([(host.node, host.accelerators) for host in self._hosts], count, devices)

    def before_calls(self, tell: Callable[[str], None] | None) -> None:
        """Set a function that is called with each method's name before the workers; ``None`` unsets it."""
        self._before_call = tell

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Call a function with each answer to the calls of the block, and every second between them."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @property
    def cluster(self) -> str:
        """The Ray cluster that the workers share with others, for people; empty without one."""
        return self._transport.cluster

    @property
    def is_ended(self) -> bool:
        """Whether the processes were ended, by an error or in order."""
        return self._ended

    def call(
        self,
        method: str,
        *,
        per_rank: Sequence[Arguments] | None = None,
        timeout_s: float | None = None,
        **same_for_all: Any,
    ) -> list[Any]:
        """Call a method of every worker object and return the results by rank.

        Values are copied by pickle: a tensor that is a view carries the whole storage behind it.

        :param per_rank: Arguments of each rank, added to ``same_for_all``.
        :param timeout_s: Longest wait; ``None`` takes ``run.timeout_s``.
        :param same_for_all: Keyword arguments.
        :raises WorkerFailedError: A worker raised; the group is ended.
        :raises WorkerDiedError: A worker process ended; the group is ended.
        :raises DeadlineError: Not every worker answered in time; the group is ended.
        """
        return self.call_async(method, per_rank=per_rank, timeout_s=timeout_s, **same_for_all).result()

    def call_async(
        self,
        method: str,
        *,
        per_rank: Sequence[Arguments] | None = None,
        timeout_s: float | None = None,
        **same_for_all: Any,
    ) -> PendingCall:
        """Start a call and return at once. The group takes no other call before its result was asked for."""
        if self._before_call is not None:
            self._before_call(method)
        return self._submit(method, per_rank, timeout_s, same_for_all, lifecycle=False)

    def begin(self) -> None:
        """Have the workers prepare themselves; :meth:`ready` waits for them. Later calls do nothing."""
        if self._begun:
            return
        self._begun = True
        deadline = time.monotonic() + self._spec.config.placement.start_timeout_s
        hosts: list[HostInfo] = self._lifecycle("locate", deadline)
        self._hosts = hosts
        for rank, host in enumerate(hosts):
            self._who[rank] = WorkerId(role=self._spec.role, rank=rank, pid=host.pid, host=host.host)
        self._transport.located(hosts)
        nodes = [host.node for host in hosts]
        cluster = self._spec.config.cluster
        places = (
            []
            if is_one_plain_host(cluster, nodes, self._transport.driver_node)
            else self._inspect(hosts, deadline)
        )
        rendezvous = make_rendezvous(cluster, nodes, places) if self._spec.collective else None
        arguments = [
            ((), {"workers_on_host": nodes.count(host.node), "address": reached_at(self._spec.config, host)})
            for host in hosts
        ]
        timeout_s = max(0.0, deadline - time.monotonic())
        starting = self._submit("start", arguments, timeout_s, {"rendezvous": rendezvous}, lifecycle=True)
        self._preparing = _BringUp(starting, rendezvous)

    def connect(self) -> None:
        """Wait until the workers have prepared themselves, and have them make their objects.

        :meth:`ready` waits for those. Later calls do nothing. Raises as :meth:`ready` does.
        """
        self.begin()
        if (preparing := self._preparing) is None:
            return
        self._preparing = None
        # from here on: other roles may have been waited for in between
        timeout_s = self._spec.config.placement.start_timeout_s
        port = preparing.pending.result(timeout_s)[0]
        arguments = {"rendezvous": preparing.rendezvous, "port": port}
        self._connecting = self._submit("connect", None, timeout_s, arguments, lifecycle=True)

    def ready(self) -> None:
        """Wait until the workers are there: devices, process group, worker objects. Later calls do nothing.

        :raises WorkerFailedError: A worker could not come up; the group is ended.
        :raises WorkerDiedError: A worker process ended; the group is ended.
        :raises DeadlineError: They were not ready within ``placement.start_timeout_s``; the group is ended.
        """
        self.connect()
        if (connecting := self._connecting) is not None:
            self._connecting = None
            connecting.result(self._spec.config.placement.start_timeout_s)
            place = f" on the {self.cluster}" if self.cluster else ""
            _log.info("%s%s: %s", self._spec.role, place, "; ".join(map(str, self.workers)))

    def _inspect(self, hosts: Sequence[HostInfo], deadline: float) -> list[ClusterNode]:
        """Return the node of each rank, having checked that a run can go on over them."""
        config, directory = self._spec.config, self._spec.run_directory
        paths = [*model_paths(config), *(str(path.absolute()) for path in self._spec.reads)]
        shared = self._spec.collective and saves(config)
        with ExitStack() as stack:
            marker = stack.enter_context(marker_file(directory)) if shared else None
            facts: list[NodeFacts] = self._lifecycle("inspect", deadline, paths=paths, marker=marker)
        places = [
            ClusterNode(name=f"{host.host} ({host.ip})", ip=host.ip, facts=facts_of_host)
            for host, facts_of_host in zip(hosts, facts, strict=True)
        ]
        check_nodes(config.cluster, node_facts(), places, directory)
        return places

    def close(self) -> None:
        """Close the workers in order, then make sure that they are gone."""
        if self._ended:
            return
        try:
            if not self._pending:
                self._lifecycle(CLOSE, time.monotonic() + CLOSE_TIMEOUT_S)
        finally:
            self.end(orderly=not self._pending)

    def end(self, *, orderly: bool = False) -> None:
        """End the worker processes without asking them."""
        if not self._ended:
            self._ended = True
            self._transport.end(orderly=orderly)

    def _lifecycle(self, method: str, deadline: float, **same_for_all: Any) -> list[Any]:
        timeout_s = max(0.0, deadline - time.monotonic())
        return self._submit(method, None, timeout_s, same_for_all, lifecycle=True).result()

    def _submit(
        self,
        method: str,
        per_rank: Sequence[Arguments] | None,
        timeout_s: float | None,
        same_for_all: Mapping[str, Any],
        *,
        lifecycle: bool,
    ) -> PendingCall:
        if self._ended:
            raise WorkerDiedError(
                f"Cannot call {method!r}: the workers of role {self._spec.role} were ended.",
                hint="An earlier error ended them; the run raised it then.",
            )
        assert not self._pending, "one call at a time"
        assert per_rank is None or len(per_rank) == len(self._ranks)
        messages = _messages(method, per_rank, same_for_all, lifecycle, len(self._ranks))
        self._pending = set(self._ranks)
        for rank, message in enumerate(messages):
            self._transport.send(rank, message)
        limit_s = self._spec.config.run.timeout_s if timeout_s is None else timeout_s
        return PendingCall(self, method, limit_s, START_SETTING if lifecycle else CALL_SETTING)

    def _gather(self, method: str, timeout_s: float, setting: str) -> list[Any]:
        outcomes: dict[int, Returned | Raised | Died] = {}
        deadline = time.monotonic() + timeout_s
        while self._pending:
            look = deadline if self._watch is None else min(deadline, time.monotonic() + WATCH_S)
            arrived = self._receive(look)
            if not arrived and look >= deadline:
                self._expire(method, timeout_s, setting)
            if method == CLOSE:  # one that has answered exits while the others still close
                arrived = {rank: outcome for rank, outcome in arrived.items() if rank not in outcomes}
            outcomes |= arrived
            if any(not isinstance(outcome, Returned) for outcome in arrived.values()):
                self._fail(method, outcomes)
            if self._watch is not None:
                self._watch(method, len(outcomes), len(self._ranks))
        return [outcome.value for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Returned)]

    def _receive(self, deadline: float) -> dict[int, Returned | Raised | Died]:
        arrived = self._transport.wait(max(0.0, deadline - time.monotonic()))
        self._pending -= arrived.keys()
        return {rank: reply if isinstance(reply, Died) else decode(reply) for rank, reply in arrived.items()}

    def _fail(self, method: str, outcomes: dict[int, Returned | Raised | Died]) -> None:
        """End the group and raise what went wrong first.

        A death may become known only after the errors that it caused in the other ranks.
        """
        suspect = any(isinstance(outcome, Raised) and outcome.lost_peer for outcome in outcomes.values())
        deadline = time.monotonic() + (self._transport.death_grace_s if suspect else GRACE_S)
        while not any(isinstance(outcome, Died) for outcome in outcomes.values()):
            arrived = self._receive(deadline)
            if not arrived:
                break
            outcomes |= arrived
        failures = {rank: outcome for rank, outcome in outcomes.items() if not isinstance(outcome, Returned)}
        self.end()
        raise error_of(failures, self._who, partial(self._advise, method))

    def _advise(self, method: str, death: Died) -> str | None:
        oom_kills = read_oom_kills() - self._oom_kills
        return advise_death(death, method, self._spec.config, oom_kills)

    def _expire(self, method: str, timeout_s: float, setting: str) -> None:
        running = sorted(self._pending)
        stacks = self._transport.stacks(running[:MAX_STACKS])
        self.end()
        who, logs = [self._who[rank] for rank in running], {rank: self._spec.log(rank) for rank in running}
        raise deadline_error(method, timeout_s, who, stacks, setting, logs)


def reached_at(config: Config, host: HostInfo) -> str:
    """Return the address at which the run's other processes reach a worker's node."""
    is_alone = config.placement.launcher == "local" or config.cluster.address == "start"
    return "127.0.0.1" if is_alone else host.ip


def _messages(
    method: str,
    per_rank: Sequence[Arguments] | None,
    same_for_all: Mapping[str, Any],
    lifecycle: bool,
    num_workers: int,
) -> list[bytes]:
    if per_rank is None:
        return [encode(MethodCall(method=method, kwargs=same_for_all, lifecycle=lifecycle))] * num_workers
    return [
        encode(MethodCall(method=method, args=args, kwargs={**same_for_all, **kwargs}, lifecycle=lifecycle))
        for args, kwargs in per_rank
    ]
