"""Workers as Ray actors, on this host or on a cluster."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from anygauge.failures import on_failure
from anygauge.runtime.diagnostics import dump_stacks, enable_stacks, log_size, tail
from anygauge.runtime.placement import (
    DETECTED_BY_RAY,
    actor_options,
    check_capacity,
    placement_error,
    rank_order,
)
from anygauge.runtime.ray_commands import head_command
from anygauge.runtime.ray_environment import OWN_CLUSTER
from anygauge.runtime.rpc import Died, MethodCall, capture, encode
from anygauge.runtime.worker import HostInfo, Worker, WorkerSetup
from anygauge.runtime.worker_group import LaunchSpec
from anygauge.wording import counted
from anygauge_hooks.errors import PlacementError

__all__ = ["RayTransport", "RayWorker"]

NAMESPACE = "anygauge"
QUIET = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
PING_S = 1.0
"""Interval of checks whether an idle actor is alive."""
IDLE_S = 0.1
OUTSIDE = "ray://"
"""Start of the address of a cluster that the driver is no part of."""
SLOTS = 1024
"""Workers that a cluster of our own has room for, where they take no device."""
_NO_DEVICES = ("memory", "object_store_memory")
"""Resources of a node that are bytes."""
EXIT_GRACE_S = 5.0
REACH_S = 10.0
REMOTE_READ_S = 30.0
"""For reading a log on another node."""
SHARED_BYTES = 2**20
"""Size above which a message to several workers is stored once for all of them."""
PING = encode(MethodCall(method="ping", kwargs={}, lifecycle=True))
EXIT_DETAIL = re.compile(r"Worker exit detail: *(.*?)(?= Some common causes| There are some|\n|$)")


class RayWorker(Worker):
    """The worker inside an actor. Its output goes to the log of the run instead of Ray's session folder."""

    def __init__(self, setup: WorkerSetup) -> None:
        _redirect_output(Path(setup.log))
        enable_stacks()
        super().__init__(setup)

    def locate(self) -> HostInfo:
        """Return where this process runs."""
        node = ray.get_runtime_context().get_node_id()
        accelerators = tuple(self.accelerator_ids())
        return replace(super().locate(), ip=get_node_ip_address(), node=node, accelerators=accelerators)

    def accelerator_ids(self) -> Sequence[str]:
        """Return the ids of this worker's devices: assigned by Ray, or shared with training workers."""
        if self.setup.accelerators is not None:
            return self.setup.accelerators
        assigned: Mapping[str, Sequence[str]] = ray.get_runtime_context().get_accelerator_ids()
        return [device for devices in assigned.values() for device in devices]


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class RayTransport:
    """Actors in one placement group, on the cluster of this process: joined, attached to or started."""

    death_grace_s = 3.0

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._log_starts = [log_size(spec.log(rank)) for rank in range(spec.num_workers)]
        self._hosts: Sequence[HostInfo] = ()
        self._actors: list[Any] = []
        self._dead: set[int] = set()
        self._replies: dict[int, Any] = {}
        self._pings: dict[int, Any] = {}
        self._shared: tuple[bytes, Any] = (b"", None)
        self._placement: Any = None
        self._connected = _connect(spec)
        # A driver that talks to the cluster from outside is on none of its nodes.
        self._outside = spec.config.cluster.address.startswith(OUTSIDE)
        self.driver_node = "" if self._outside else str(ray.get_runtime_context().get_node_id())
        with on_failure(partial(self.end, orderly=False)):
            is_own = self._connected and spec.config.cluster.address == OWN_CLUSTER
            # ``auto`` may find somebody else's cluster, as with Ray itself; so each run says what it joined.
            self.cluster = "" if is_own else _describe(spec.config.cluster.address)
            self._place()

    def _place(self) -> None:
        token = uuid.uuid4().hex[:8]
        if self._spec.seats:
            for rank, seat in enumerate(self._spec.seats):
                affinity = NodeAffinitySchedulingStrategy(seat.node, soft=False)
                self._actors.append(self._start_actor(rank, affinity, {"num_cpus": 0}, token))
            return
        bundle = {self._spec.backend.scheduler_resource: float(self._spec.devices)}
        if not self.cluster:
            check_capacity(bundle, self._spec.num_workers + self._spec.extra_devices, _totals())
        self._placement = placement_group([bundle] * self._spec.num_workers, strategy="PACK")
        timeout_s = self._spec.config.placement.start_timeout_s
        if not self._placement.wait(timeout_s):
            place = f" on the {self.cluster}" if self.cluster else ""
            why = f"No room for the workers of role {self._spec.role}{place} within {timeout_s:g} s"
            left = _totals() if self._outside else _available()
            raise placement_error(bundle, self._spec.num_workers, left, why)
        order = rank_order(placement_group_table(self._placement)["bundles_to_node_id"])
        for rank, index in enumerate(order):
            own = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=index)
            self._actors.append(self._start_actor(rank, own, actor_options(bundle), token))

    def _start_actor(self, rank: int, strategy: Any, options: Mapping[str, Any], token: str) -> Any:
        spec = self._spec
        actor = ray.remote(RayWorker).options(
            **options,
            name=f"{spec.config.run.name}-{spec.role}-{rank}-{token}",
            namespace=NAMESPACE,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": dict(spec.env)},
        )
        return actor.remote(spec.setup(rank))

    def send(self, rank: int, message: bytes) -> None:
        """Send a request. A process that has died is reported by :meth:`wait`."""
        if rank not in self._dead:
            self._replies[rank] = self._actors[rank].handle.remote(self._stored(message))

    def _stored(self, message: bytes) -> Any:
        """Return a message, or a reference to it if it is large: Ray stores an argument for each call."""
        if len(message) < SHARED_BYTES:
            self._shared = (b"", None)
            return message
        if self._shared[0] is not message:
            self._shared = (message, ray.put(message))
        return self._shared[1]

    def wait(self, timeout_s: float) -> Mapping[int, bytes | Died]:
        """Return replies and deaths once there are any; empty at the deadline. Each death comes once."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            self._ping_idle()
            self._pause(min(remaining, PING_S))
            arrived = {**self._take_deaths(), **self._take_replies()}
            if arrived or remaining == 0.0:
                return arrived

    def _ping_idle(self) -> None:
        """Ask the actors that owe no reply for a sign of life: Ray reports a death only to a pending call."""
        for rank in range(len(self._actors)):
            if rank not in self._dead and rank not in self._replies and rank not in self._pings:
                self._pings[rank] = self._actors[rank].handle.remote(PING)

    def _pause(self, timeout_s: float) -> None:
        if self._replies:
            ray.wait(list(self._replies.values()), num_returns=1, timeout=timeout_s)
        else:
            time.sleep(min(timeout_s, IDLE_S))

    def _take_replies(self) -> dict[int, bytes | Died]:
        return {rank: self._get(rank, ref) for rank, ref in _pop_ready(self._replies)}

    def _take_deaths(self) -> dict[int, bytes | Died]:
        answers = {rank: self._get(rank, ref) for rank, ref in _pop_ready(self._pings)}
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, Died)}

    def _get(self, rank: int, ref: Any) -> bytes | Died:
        try:
            reply: bytes = ray.get(ref)
        except RayActorError as error:
            self._dead.add(rank)
            log = self._on_node_of(rank, tail, self._spec.log(rank), self._log_starts[rank])
            return Died(how=f"died (Ray: {_exit_detail(error)})", log=log)
        except RayError as error:
            return encode(capture(error))
        return reply

    def located(self, hosts: Sequence[HostInfo]) -> None:
        """Learn where the workers run; from now on they can be asked for their stacks."""
        self._hosts = hosts

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return the thread stacks of running workers, by rank; empty before they were located."""
        asked = [rank for rank in ranks if self._hosts and rank not in self._dead]
        return {
            rank: self._on_node_of(rank, dump_stacks, self._hosts[rank].pid, self._spec.log(rank))
            for rank in asked
        }

    def _on_node_of(self, rank: int, function: Callable[..., str], *args: Any) -> str:
        """Call a function on the host of a worker, beside it: the worker itself may be busy or dead."""
        if not self._hosts or self._hosts[rank].node == self.driver_node:
            return function(*args)
        strategy = NodeAffinitySchedulingStrategy(self._hosts[rank].node, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        try:
            return str(ray.get(task.remote(*args), timeout=REMOTE_READ_S))
        except RayError as error:
            return f"(node {self._hosts[rank].host} does not answer: {type(error).__name__})"

    def end(self, *, orderly: bool) -> None:
        """End every actor, and return when all are gone."""
        try:
            if orderly:
                exits = [actor.__ray_terminate__.remote() for actor in self._actors]
                ray.wait(exits, num_returns=len(exits), timeout=EXIT_GRACE_S)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            if self._placement is not None:
                remove_placement_group(self._placement)
            _wait_gone([host.pid for host in self._hosts if host.node == self.driver_node])
        finally:
            if self._connected:
                ray.shutdown()


def _pop_ready(refs: dict[int, Any]) -> list[tuple[int, Any]]:
    """Remove the finished calls and return them by rank."""
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=0) if refs else ([], [])
    return [(rank, refs.pop(rank)) for rank in list(refs) if refs[rank] in ready]


def _exit_detail(error: RayActorError) -> str:
    text = str(error)
    detail = EXIT_DETAIL.search(text)
    return detail.group(1).rstrip(".") if detail else text.strip()


def _wait_gone(pids: Sequence[int]) -> None:
    """Wait until Ray has ended processes of this host, which it does in the background; else end them."""
    deadline = time.monotonic() + EXIT_GRACE_S
    remaining = [pid for pid in pids if psutil.pid_exists(pid)]
    while remaining and time.monotonic() < deadline:
        time.sleep(0.02)
        remaining = [pid for pid in remaining if psutil.pid_exists(pid)]
    for pid in remaining:
        os.kill(pid, signal.SIGKILL)


def _connect(spec: LaunchSpec) -> bool:
    """Connect to Ray unless this process is connected already; return whether it was done here."""
    if ray.is_initialized():
        return False
    address = spec.config.cluster.address
    with _keep_sigterm_handler():
        if address == OWN_CLUSTER:
            ray.init(**_cluster(spec), **QUIET)
        else:
            _attach(address, shlex.join(head_command(spec.backend, spec.num_workers + spec.extra_devices)))
    return True


def _attach(address: str, start_line: str) -> None:
    try:
        _check_reachable(address)
        ray.init(address=address, **QUIET)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise PlacementError(
            f"Cannot join a Ray cluster at cluster.address = {address!r}: {error}",
            hint=f"Start one: `{start_line}`, or let the run start its own: --cluster.address start. If it "
            "asks for a token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (docs/clusters.md).",
        ) from error


def _describe(address: str) -> str:
    """Return address, size and resources of the cluster that this process is connected to.

    :param address: ``cluster.address``.
    """
    if not address.startswith(OUTSIDE):
        address = ray.get_runtime_context().gcs_address
    nodes = _totals().values()
    totals = Counter[str]()
    for resources in nodes:
        totals.update({name: int(amount) for name, amount in resources.items() if name not in _NO_DEVICES})
    # Ray adds one resource for each node and one for each type of accelerator, whose names have a colon.
    shown = ", ".join(f"{name}: {totals[name]}" for name in sorted(totals) if ":" not in name)
    return f"Ray cluster at {address} with {counted(len(nodes), 'node')} ({shown})"


def _check_reachable(address: str) -> None:
    """Raise :class:`OSError` if nobody listens at an address; Ray needs two minutes, and exits."""
    if address == "auto":
        # Ray remembers the last cluster of a host, also one that was killed; there is no public call for it.
        from ray._private.services import canonicalize_bootstrap_address

        address = canonicalize_bootstrap_address("auto")
    host, _, port = address.removeprefix(OUTSIDE).rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()


def _cluster(spec: LaunchSpec) -> dict[str, Any]:
    # Ray keeps an idle process ready for each core that it knows of; no worker of a run takes a core.
    resource, slots = spec.backend.scheduler_resource, max(spec.num_workers, SLOTS)
    declared = {} if resource in DETECTED_BY_RAY else {resource: slots}
    return {"address": "local", "num_cpus": 1, "resources": declared, "include_dashboard": False}


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Put back the process's own handler, which Ray replaces when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _totals() -> dict[str, Mapping[str, float]]:
    return {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _available() -> dict[str, Mapping[str, float]]:
    # Ray has no public call for what each node has left; its own libraries use this one.
    from ray._private.state import available_resources_per_node

    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return {names.get(key, key): left for key, left in available_resources_per_node().items()}
