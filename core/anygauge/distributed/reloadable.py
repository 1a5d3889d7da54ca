"""Reloadable process groups, whose communicators can be released and created again.

A communicator of an accelerator holds memory of the device for as long as it lives, and engines on the same
device have use for it. So torch is given groups that forward to a group inside; that one goes, and another
takes its place, while whoever holds the outer group notices nothing. This is torch's own way to bring another
kind of group (``torch.distributed.Backend.register_backend``): nothing is replaced in torch or in Megatron.

Messages in one batch (``batch_isend_irecv``) are sent one by one in such groups, since torch batches only for
its own class. Pipelines rely on the batch; they keep plain groups.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import torch
from torch.distributed import Backend, PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]  # not listed

from anygauge_hooks.errors import AsleepError

__all__ = ["ReloadableGroup", "ReloadableGroups", "register_reloadable"]

Make = Callable[[Any, Any], Any]
"""The hook ``make_communicator`` of a backend."""
_OWN = frozenset(
    (
        *("rank", "size", "name", "boxed", "unbox", "get_group_store", "shutdown", "abort", "_id"),
        *("_set_group_name", "_set_group_desc", "_has_hooks", "_wait_for_pending_works"),
    )
)
"""Methods that a group answers by itself; all others are those of the group inside."""
_numbers = itertools.count()


class ReloadableGroup(ProcessGroup):
    """A process group that forwards to another one, which can be released and made again.

    :param make: Makes a communicator from torch's options and those of the group.
    :param options: Torch's, with the store; a group inside gets a part of it for itself.
    :param own: Options of the group, of whatever class the communicator has.
    :param device_type: Type of device of the tensors that it takes.
    :param backend: Name of the backend that the communicator is of.
    """

    def __init__(self, make: Make, options: Any, own: Any, *, device_type: str, backend: str) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]  # its stub has another
        self._make, self._options, self._own = make, options, own
        self._device = torch.device(device_type)
        self._kind = Backend.backend_type_map.get(backend, ProcessGroup.BackendType.CUSTOM)
        self._store: Store = options.store
        self._lives, self._name = 0, ""
        self.number = next(_numbers)
        """In the order in which groups were made, which is the same on all ranks."""
        self._inside: ProcessGroup | None = None
        self.reload()

    def reload(self) -> None:
        """Create the inner group, if there is none. Every rank of the group calls it."""
        if self._inside is not None:
            return
        store = self._options.store = PrefixStore(f"life-{self._lives}/", self._store)
        self._lives += 1
        inside = ProcessGroup(store, self._options.group_rank, self._options.group_size)
        inside._set_default_backend(self._kind)
        inside._register_backend(self._device, self._kind, self._make(self._options, self._own))
        self._inside = inside

    def release(self) -> None:
        """Destroy the inner group and its communicator."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.shutdown()

    def inside(self, purpose: str) -> ProcessGroup:
        """Return the group inside.

        :raises AsleepError: It was released.
        """
        if self._inside is None:
            raise AsleepError(
                f"A process group was asked for {purpose}, which needs a communicator; it has none now.",
                hint="Wake the workers up first; see placement.colocated.",
            )
        return self._inside

    @property
    def group_name(self) -> str:  # type: ignore[override]  # its stub has a private type
        """Name that torch knows the group by; torch's own property asks a communicator for it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [self._device]

    def shutdown(self) -> None:
        """Destroy the inner group, if there is one."""
        self.release()

    def abort(self) -> None:
        """Abort collectives in flight."""
        if self._inside is not None:
            self._inside.abort()


def _forwarded(name: str) -> Callable[..., Any]:
    @wraps(getattr(ProcessGroup, name))
    def call(self: ReloadableGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inside(name), name)(*args, **kwargs)

    return call


for _name, _method in inspect.getmembers(ProcessGroup, inspect.isroutine):
    if not _name.startswith("__") and _name not in _OWN:
        setattr(ReloadableGroup, _name, _forwarded(_name))


class ReloadableGroups:
    """All groups of one process that can be reloaded.

    :param store: Store that all ranks share.
    """

    def __init__(self, store: Store, world_size: int, timeout_s: float) -> None:
        self._store, self._world_size = store, world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._meetings = itertools.count()
        self._known: weakref.WeakSet[ReloadableGroup] = weakref.WeakSet()

    def make(self, make: Make, device_type: str, backend: str, options: Any, own: Any) -> ReloadableGroup:
        """Return a group, which is one of these from now on."""
        group = ReloadableGroup(make, options, own, device_type=device_type, backend=backend)
        self._known.add(group)
        return group

    def release(self) -> None:
        """Destroy every communicator that connects ranks, after all collectives. Every rank calls it.

        One rank alone exchanges nothing, so its communicator has no buffers worth the time. The others end at
        the same time: each waits for threads of its library, half a second with NCCL.
        """
        self._meet()
        groups = [group for group in self._groups() if group.size() > 1]
        if not groups:
            return
        with ThreadPoolExecutor(len(groups), initializer=_same_device()) as threads:
            list(threads.map(ReloadableGroup.release, groups))

    def reload(self) -> None:
        """Make every communicator again that was given up. Every rank does so."""
        for group in self._groups():
            group.reload()

    def _groups(self) -> list[ReloadableGroup]:
        """Return the groups in the order of all ranks: making one may wait for its other ranks."""
        return sorted(self._known, key=lambda group: group.number)

    def _meet(self) -> None:
        """Return once every rank is here, by the store: after a collective some might still be in it."""
        key = f"released-{next(self._meetings)}"
        if self._store.add(key, 1) == self._world_size:
            self._store.set(f"{key}-by-all", "")
        self._store.wait([f"{key}-by-all"], self._timeout)


def _same_device() -> Callable[[], None]:
    """Return a function that gives a thread the current device of this one."""
    if not torch.accelerator.is_available():
        return lambda: None
    return partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())


def register_reloadable(groups: ReloadableGroups, make: Make, device_type: str, backend: str) -> str:
    """Register groups that can be reloaded with torch, and return the name to ask for them."""
    name = f"{backend}_reloadable"
    if name.upper() in Backend._plugins:  # of groups that were destroyed
        name = f"{name}_{next(_numbers)}"
    Backend.register_backend(
        name, partial(groups.make, make, device_type, backend), extended_api=True, devices=[device_type]
    )
    return name
