"""The default process group of a worker, and decisions of its ranks through their store."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed
from torch.distributed import HashStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]  # not listed

from anygauge.distributed.peer_verification import connection_errors, verify_peers
from anygauge.distributed.reloadable import ReloadableGroups, register_reloadable
from anygauge.failures import on_failure
from anygauge.plugins import Plugins
from anygauge_hooks.types import BackendSpec

__all__ = [
    "HostExchange",
    "destroy_process_group",
    "host_exchange",
    "init_process_group",
    "release_process_groups",
    "reload_process_groups",
]

LOOPBACK_INTERFACE = "lo"
HOST_BACKEND = "gloo"
SERIAL_HOST_BACKEND = "gloo_serial"
"""The host backend with one thread in each group, and so one collective at a time.

Torch gives each group two. In torch 2.13 both write down the name of what they have done, without a lock:
names of more than 15 letters, such as that of the gathers that Megatron has under way, break the heap.
"""


class HostExchange:
    """Collects a text from every rank on rank 0 through the rendezvous store, and gives each rank its answer.

    A check of collectives cannot use them: where a gather returns a rank's own part, every rank looks the
    same. All ranks must make the same calls in the same order. A key is deleted once it has been read.

    :param store: Shared by all ranks; its timeout limits each wait.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0

    def decide(self, text: str, judge: Callable[[Sequence[str]], str]) -> str:
        """Return what ``judge`` makes of the texts of all ranks; it is called on rank 0 alone."""
        keys = [f"exchange/{self._count}/{rank}" for rank in range(self._size)]
        self._count += 1
        if self._rank == 0:
            return self._answer(text, keys, judge)
        self._store.set(keys[self._rank], text)
        answer: bytes = self._store.get(keys[0])
        self._store.delete_key(keys[self._rank])
        return answer.decode()

    def _answer(self, text: str, keys: Sequence[str], judge: Callable[[Sequence[str]], str]) -> str:
        others = self._store.multi_get(list(keys[1:])) if self._size > 1 else []
        answer = judge([text, *(other.decode() for other in others)])
        if self._size > 1:
            self._store.set(keys[0], answer)
            if self._count > 1:  # every rank has come here, and so has read the answer before
                self._store.delete_key(f"exchange/{self._count - 2}/0")
        return answer


_reloadable: list[ReloadableGroups] = []
"""The groups of this process, where they are."""
_exchanges: list[HostExchange] = []
"""The exchange of the default group, while there is one."""


def init_process_group(
    plugins: Plugins,
    backend: BackendSpec,
    store: Store,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    single_host: bool,
    address: str | None = None,
    reloadable: bool = False,
) -> None:
    """Initialize the default process group. A collective: returns when every rank has come.

    :param plugins: Asked for the group's options (``make_process_group_options``) and communicators
        (``make_communicator``).
    :param store: Shared by all ranks.
    :param timeout_s: Seconds until a collective of the group fails.
    :param single_host: Keep host-side traffic on the loopback interface.
    :param address: Address of this host, for collectives of the host backend; ``None`` lets it choose.
    :param reloadable: Whether this group, and those that are made of its ranks later, can be released and
        reloaded; they are if the backend makes communicators.
    """
    if single_host:
        # Otherwise gloo resolves the host's name, which fails or picks a dead interface on many laptops.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    options = plugins.first(
        "make_process_group_options", backend=backend, group_name="default", timeout_s=timeout_s
    )
    name, make = backend.dist_backend, partial(_communicator, plugins, backend)
    if name == HOST_BACKEND:
        make = partial(_serial_group, address)
    if reloadable and plugins.implementations("make_communicator", backend):
        groups = ReloadableGroups(store, world_size, timeout_s)
        _reloadable.append(groups)
        name = register_reloadable(groups, make, backend.device_type, name)
    elif name == HOST_BACKEND:
        name = SERIAL_HOST_BACKEND
        torch.distributed.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])
    torch.distributed.init_process_group(
        name,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=options,
    )
    _exchanges[:] = [HostExchange(store, rank, world_size)]


def host_exchange() -> HostExchange:
    """Return the exchange of the ranks of the default group, which uses the store alone."""
    if _exchanges:
        return _exchanges[0]
    assert torch.distributed.get_world_size() == 1, "several ranks have a group of init_process_group"
    return HostExchange(HashStore(), 0, 1)


def release_process_groups() -> None:
    """Release the device memory of all reloadable groups. Every rank calls it."""
    for groups in _reloadable:
        groups.release()


def reload_process_groups() -> None:
    """Let all groups communicate again, where they were released. Every rank does so."""
    for groups in _reloadable:
        groups.reload()


def _communicator(plugins: Plugins, backend: BackendSpec, options: Any, group_options: Any) -> Any:
    return plugins.first("make_communicator", backend=backend, options=options, group_options=group_options)


def _serial_group(address: str | None, given: Any, group_options: Any) -> Any:
    del group_options
    gloo: Any = ProcessGroupGloo  # its type stub has another constructor
    options = gloo._Options()
    options._devices = devices = _host_devices(gloo, address)
    options._threads = 1
    options._timeout = given.timeout
    rank, size = given.group_rank, given.group_size
    # Without its port, the other ranks learn of a failure at once, and not at their deadline. The port of a
    # device stays while an earlier group has it.
    with connection_errors(), on_failure(_create_devices.cache_clear):
        group = gloo(given.store, rank, size, options)
        verify_peers(group, given.store, rank=rank, size=size, contexts=len(devices))
    return group


def _host_devices(gloo: Any, address: str | None) -> list[Any]:
    """Return torch's default devices, or those of an address: of an interface, torch takes the first."""
    return _create_devices(gloo, address, os.environ.get("GLOO_SOCKET_IFNAME", ""))


@cache
def _create_devices(gloo: Any, address: str | None, interfaces: str) -> list[Any]:
    """Create gloo devices, once for all groups of this process.

    A device has a port and a thread that wakes up a hundred times a second. Megatron makes some twenty
    groups, and torch a device for each.
    """
    if address is not None:
        return [gloo.create_device(hostname=address)]
    if interfaces:
        return [gloo.create_device(interface=name) for name in interfaces.split(",")]
    return [gloo.create_default_device()]


os.register_at_fork(after_in_child=_create_devices.cache_clear)  # a device's thread is not in the child


def destroy_process_group() -> None:
    """Destroy every process group of this process, if there are any."""
    _reloadable.clear()
    _exchanges.clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
