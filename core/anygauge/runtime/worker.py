"""Worker runtime inside a process, the same under every launcher.

A process comes up in two steps, since the ranks have to learn where rank 0 listens: ``start`` prepares the
process and opens the store on rank 0, ``connect`` joins the process group and makes the worker object.
Workers that need nothing of each other, such as rollout engines, have no process group.
Nothing here imports torch before the plugins have prepared the process.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from anygauge.config.schema import Config
from anygauge.device import LateDevice, memory_phase, set_deterministic
from anygauge.hub import localized
from anygauge.observability.logs import log_worker
from anygauge.observability.phases import record_phase
from anygauge.observability.start_times import StartTimes
from anygauge.plugins import Plugins, find_backend, load_plugins, require_plugins
from anygauge.runtime.cluster import GroupRendezvous, NodeFacts, address_of, node_facts
from anygauge.runtime.media_stores import open_store
from anygauge.runtime.memory_advice import advise
from anygauge.runtime.rpc import MethodCall, Returned, capture, decode, encode
from anygauge_hooks.engines import TrainEngineSpec, WorkerContext
from anygauge_hooks.errors import PlacementError
from anygauge_hooks.resources import read_cpus
from anygauge_hooks.types import BackendSpec, Device, Phase

if TYPE_CHECKING:
    from anygauge.distributed.authenticated_store import AuthenticatedStore


__all__ = ["HostInfo", "Worker", "WorkerSetup", "host_cores"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Settings that a worker process is created with."""

    config: Config
    backend: str
    """Name; the process finds the backend in its own plugins."""
    worker_class: str
    """``"package.module:Class"``, called with the config and a ``WorkerContext``."""
    role: str
    rank: int
    world_size: int
    log: str
    """Log file of the process's output."""
    run_directory: str = ""
    timeout_s: float
    """Timeout of every collective."""
    plugins: Sequence[str] = ()
    """Entry points that the driver loaded; the process must have them too."""
    first_device: int = 0
    """Index of the role's first device on a host, where workers are plain processes."""
    devices: int = 1
    """Consecutive devices that the process takes."""
    accelerators: Sequence[str] | None = None
    """Physical ids of the devices, where they are those of other workers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class."""
    computes: bool = True
    """Whether the worker computes on its device; otherwise the object is made before torch is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """Facts about the host of a worker process."""

    pid: int
    host: str
    ip: str
    node: str
    """Equal for the workers of one host."""
    accelerators: Sequence[str] = ()
    """Physical ids of its devices, where the launcher has chosen them."""


def host_cores() -> int:
    """Return the number of cores that this process may use."""
    return max(1, int(read_cpus().usable))


class Worker:
    """Serves requests, one at a time, in the thread that made it."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.closed = False
        self._plugins: Plugins
        self._backend: BackendSpec
        self._device: Device
        self._store: AuthenticatedStore | None = None
        self._facts: NodeFacts | None = None
        self._accelerators: Sequence[str] = ()
        self._object: Any = None
        self._times = StartTimes()
        self._address = "127.0.0.1"

    def handle(self, message: bytes) -> bytes:
        """Run one pickled request and return its pickled outcome; never raises."""
        try:
            request: MethodCall = decode(message)
            target = self if request.lifecycle else self._object
            return encode(Returned(getattr(target, request.method)(*request.args, **request.kwargs)))
        except BaseException as error:  # noqa: BLE001 - foreign code: engines and plugins; the driver raises it
            advise(error, self.setup.config)
            # into the worker's log, since the driver may show the message alone
            _log.error("a call of the driver failed", exc_info=error)
            return encode(capture(error, hidden_frames=1))

    def locate(self) -> HostInfo:
        """Return where this process runs."""
        host = socket.gethostname()
        return HostInfo(pid=os.getpid(), host=host, ip="127.0.0.1", node=host)

    def accelerator_ids(self) -> Sequence[str]:
        """Return the physical ids of the devices that this process was given, before it hides all others."""
        setup = self.setup
        if setup.accelerators is not None:
            return setup.accelerators
        first = setup.first_device + setup.rank * setup.devices
        return [local_accelerator_id(self._backend, first + i, os.environ) for i in range(setup.devices)]

    def ping(self) -> None:
        """Show that the process lives."""

    def inspect(self, *, paths: Sequence[str], marker: str | None) -> NodeFacts:
        """Return the facts of this process's node.

        :param paths: Directories that a run needs here.
        :param marker: A file that the driver has just written.
        """
        self._facts = node_facts(paths, marker)
        return self._facts

    def start(
        self, *, workers_on_host: int, rendezvous: GroupRendezvous | None, address: str = "127.0.0.1"
    ) -> int | None:
        """Prepare the process.

        :param workers_on_host: Processes that share this host's cores.
        :param address: Address of this node, as the run's other processes reach it.
        :param rendezvous: Where the ranks meet; ``None`` for workers without a process group.
        :returns: On rank 0, the port of the store.
        """
        setup = self.setup
        self._address = address
        log_worker(setup.role, setup.rank)
        self._plugins = load_plugins()
        require_plugins(self._plugins, setup.plugins)
        backends = self._plugins.named("register_backends")
        self._backend = find_backend(self._plugins, backends, setup.backend)
        index = self._take_devices()
        self._prepare("before_vendor_import")
        threads = setup.config.placement.threads_per_worker
        set_threads(threads, workers_on_host, computes=setup.computes)
        make_device = partial(self._plugins.make_device, self._backend, index)
        if setup.computes:
            self._device = make_device()
            if setup.config.run.deterministic:
                set_deterministic()
        else:
            self._device = cast("Device", LateDevice(make_device))
        self._prepare("after_config")
        if setup.computes:
            self._times.note("device")
            self._preload()
        self._times.note("imports")
        return self._host_store(rendezvous) if rendezvous is not None and setup.rank == 0 else None

    def _preload(self) -> None:
        """Import what the worker object needs, while the driver still checks its data."""
        preload = getattr(_resolve(self.setup.worker_class), "preload", None)
        if preload is not None:
            preload(self.setup.config, self._plugins, self._backend, **self.setup.options)

    def _take_devices(self) -> int:
        """Hide every device but this worker's own, and return the index of the first of them.

        A vendor's library numbers the devices when it first looks at them, and torch counts them again
        later: the list must be final before either is imported, and nothing may change it afterwards.
        """
        ids, find = tuple(self.accelerator_ids()), self._backend.local_device
        if self.setup.accelerators is None:  # those of other workers are hidden until here
            find(ids, os.environ)  # refuses a list that leaves them out
        if ids and (name := self._backend.visible_devices_env):
            os.environ[name] = ",".join(ids)
        self._accelerators = ids
        return find(ids, os.environ)

    def _prepare(self, phase: Phase) -> None:
        setup, config = self.setup, self.setup.config
        if phase == "before_vendor_import" and config.train.provider is not None:
            engine: TrainEngineSpec = self._plugins.get("register_train_engines", config.train.engine)
            if engine.prepare:
                engine.prepare(self._plugins, self._backend)
        self._plugins.prepare_worker(self._backend, setup.role, phase, config=config, log=setup.log)

    def _host_store(self, rendezvous: GroupRendezvous) -> int:
        from anygauge.distributed.rendezvous import host_store

        self._store = host_store(
            rendezvous.host, token=rendezvous.token, peers=rendezvous.peers, timeout_s=self.setup.timeout_s
        )
        return self._store.port

    def connect(self, *, rendezvous: GroupRendezvous | None, port: int | None) -> None:
        """Join the process group, if there is one, and make the worker object.

        :param port: Port of the rendezvous store on rank 0.
        """
        setup = self.setup
        self._times.note("waited")
        if rendezvous is not None and port is not None:
            self._join(rendezvous, port)
        config = localized(setup.config, data=False)  # each node may have a cache of its own
        make = partial(_resolve(setup.worker_class), config, self._context(), **setup.options)
        if setup.computes:
            with record_phase("load"), memory_phase(self._device, "load"):
                self._object = make()
        else:
            self._object = make()
            _log.info("looks after a process on %s", self._device.torch_device)  # which is made here
        self._times.note("object")
        _log.info("start: %s", self._times)

    def _join(self, rendezvous: GroupRendezvous, port: int) -> None:
        from anygauge.distributed.process_groups import init_process_group
        from anygauge.distributed.rendezvous import join_store

        setup = self.setup
        if self._store is None:
            self._store = join_store(rendezvous.host, port, token=rendezvous.token, timeout_s=setup.timeout_s)
        init_process_group(
            self._plugins,
            self._backend,
            self._store,
            rank=setup.rank,
            world_size=setup.world_size,
            timeout_s=setup.timeout_s,
            single_host=rendezvous.single_host,
            address=self._own_address(rendezvous),
            reloadable=reloads_groups(setup.config),
        )

    def _own_address(self, rendezvous: GroupRendezvous) -> str | None:
        """Return the address for collectives on this node, if the config chooses between IPv4 and IPv6."""
        cluster = self.setup.config.cluster
        if self._facts is None or cluster.ip_version == "any":
            return None
        return address_of(self._facts.addresses, cluster, single_host=rendezvous.single_host)

    def _context(self) -> WorkerContext:
        return WorkerContext(
            rank=self.setup.rank,
            world_size=self.setup.world_size,
            backend=self._backend,
            device=self._device,
            plugins=self._plugins,
            accelerators=self._accelerators,
            address=self._address,
            media=open_store(self.setup.config, Path(self.setup.run_directory)),
        )

    def close(self) -> None:
        """Close the worker object, if it has a ``close``, and leave the process group."""
        from anygauge.distributed.process_groups import destroy_process_group

        self.closed = True
        close_object = getattr(self._object, "close", None)
        try:
            if close_object is not None:
                close_object()
        finally:
            destroy_process_group()


def reloads_groups(config: Config) -> bool:
    """Return whether process groups are released during sleep. Pipeline parallelism needs plain groups."""
    layouts = (config.train.parallel, config.critic.parallel, config.teacher.parallel)
    return config.placement.sleeps and all(each is None or each.pipeline == 1 for each in layouts)


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def set_threads(requested: int, workers_on_host: int, *, computes: bool = True) -> None:
    """Set the number of CPU threads of this process.

    :param requested: 0 divides the host's cores among its workers.
    :param computes: Whether torch is imported for it.
    """
    threads = requested or max(1, host_cores() // workers_on_host)
    # Ray sets 1 for an actor without cores; set before torch reads it, and for the children of this process.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if computes:
        import torch

        torch.set_num_threads(threads)


def local_accelerator_id(backend: BackendSpec, index: int, env: Mapping[str, str]) -> str:
    """Return the id of a device that a local worker takes.

    :param index: Among the visible devices.
    :raises PlacementError: Fewer devices are visible than the workers take.
    """
    name = backend.visible_devices_env
    if name is None or name not in env:
        return str(index)
    visible = backend.visible_devices(env[name])
    if index >= len(visible):
        raise PlacementError(
            f"There is no device {index} for a worker: {name}={env[name]!r} shows {len(visible)}.",
            hint=f"List more devices in it, separated by commas, or use at most {len(visible)} with "
            "placement.train_workers and placement.rollout_workers.",
        )
    return visible[index]
