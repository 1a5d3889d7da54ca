"""Profiles of one worker process: started and stopped by the driver, recorded by a backend's profiler."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.observability.phases import Row
from anygauge_hooks.errors import PluginError

if TYPE_CHECKING:
    from anygauge_hooks.engines import WorkerContext

__all__ = ["PROFILES", "WorkerProfiler", "memory_profile", "torch_profile"]

_log = logging.getLogger(__name__)

PROFILES = "profiles"
"""Name of the directory in the run directory."""
ALLOCATIONS = 1_000_000
"""Most allocations and frees that a history of them keeps; of more, the latest."""


class WorkerProfiler:
    """Records profiles of this process, one at a time.

    A profile that fails costs no run: methods return the reason, or ``None``.

    :param row: Names the files.
    """

    def __init__(self, context: WorkerContext, row: Row) -> None:
        self._context = context
        self._row = row
        self._profile = ExitStack()

    def start(self, kind: str, directory: str, ranks: Collection[int]) -> str | None:
        """Begin a profile.

        :param ranks: Ranks that record; none for all.
        """
        if ranks and self._row.rank not in ranks:
            return None
        path = str(Path(directory) / self._row.label)
        try:
            self._profile.enter_context(self._make(kind, path))
        except Exception as error:  # noqa: BLE001 - foreign code: profilers of backends and plugins
            return self._failed("start", error)
        return None

    def stop(self) -> str | None:
        """End the profile, if there is one, and write it."""
        try:
            self._profile.close()
        except Exception as error:  # noqa: BLE001 - foreign code: profilers of backends and plugins
            return self._failed("end", error)
        return None

    def _make(self, kind: str, path: str) -> AbstractContextManager[object]:
        backend, plugins = self._context.backend, self._context.plugins
        profile: AbstractContextManager[object] | None
        profile = plugins.first("make_profiler", backend=backend, kind=kind, path=path)
        if profile is None:
            raise PluginError(f"no plugin makes a profiler of kind {kind!r} for backend {backend.name}")
        return profile

    def _failed(self, verb: str, error: Exception) -> str:
        _log.warning("the profile did not %s", verb, exc_info=error)
        return f"{self._row.label}: the profile did not {verb}: {error!r}"


@contextmanager
def torch_profile(device_type: str, path: str) -> Iterator[None]:
    """Record the block with torch's profiler, of the host and of the device if torch can.

    :param path: Path of the trace, without ``.trace.json.gz``: Perfetto, ``chrome://tracing`` and TensorBoard
        open it.
    """
    import torch

    activity = torch.profiler.ProfilerActivity
    own = {activity.CPU, getattr(activity, device_type.upper(), activity.CPU)}
    activities = own & torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    # There is one cycle only: torch 2.11 warns that the events of earlier ones are lost.
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield
    profile.export_chrome_trace(f"{path}.trace.json.gz")


@contextmanager
def memory_profile(device_type: str, path: str) -> Iterator[None]:
    """Record every allocation of the block on the device with its stack.

    :param path: Path of the snapshot, without ``.pickle``; https://pytorch.org/memory_viz draws it.
    :raises AttributeError: Torch keeps no such history for this type of device.
    """
    import torch

    memory = torch.get_device_module(device_type).memory
    memory._record_memory_history(max_entries=ALLOCATIONS)
    try:
        yield
        memory._dump_snapshot(f"{path}.pickle")
    finally:
        memory._record_memory_history(enabled=None)
