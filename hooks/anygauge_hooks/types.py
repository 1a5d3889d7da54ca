"""Values that cross the plugin boundary. Frozen, picklable, free of vendor imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from anygauge_hooks.media import MediaStore
    from anygauge_hooks.models import ModelSpec
    from anygauge_hooks.settings import RunConfig

__all__ = [
    "AcceleratorIds",
    "Availability",
    "BackendSpec",
    "CaptureGraph",
    "ConfigChange",
    "ConfigProblem",
    "Device",
    "FunctionPath",
    "Graph",
    "HostCheck",
    "LoadedPlugins",
    "NamedFunction",
    "Phase",
    "PluginInfo",
    "RunInfo",
    "Tracker",
    "TrackerSpec",
    "WorkerContext",
]

FunctionPath = NewType("FunctionPath", str)
"""Annotation of an option that names a function, ``package.module:function``: the checks of the config import
it, before anything starts."""
AcceleratorIds = Sequence[str]
"""Physical device ids as a scheduler reports them."""

Phase = Literal["before_vendor_import", "after_config"]
"""When ``prepare_worker`` is called: before torch's vendor library and Megatron are imported, or once the
config is known and before the first process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """Facts about a plugin that are read before its hooks are checked."""

    contract_version: int
    """``anygauge_hooks.CONTRACT_VERSION`` of the release that the plugin was written for, as a number."""
    backends: Sequence[str] = ()
    """Backends that an add-on is for, by name: in a run on another backend, its hooks with an argument
    ``backend`` are not called. A plugin that registers backends need not name them."""
    hookspecs: Sequence[ModuleType | type] = ()
    """Modules or classes whose functions, marked with ``anygauge_hooks.hookspec``, are hooks that this plugin
    adds and calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a backend can run on this host, and why not if it cannot."""

    ok: bool
    reason: str = ""
    """Cause of the unavailability, as a clause: ``"torch_npu is not installed"``."""
    hint: str | None = None
    """Action for the user, as a command where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheck:
    """One thing that a backend needs of its host, or can use: a driver, a library, a device file."""

    name: str
    status: Literal["PASS", "FAIL", "NOT INSTALLED", "UNKNOWN"]
    """``FAIL`` is there but wrong; ``NOT INSTALLED`` is not there, which may be fine; ``UNKNOWN`` is there,
    and nothing tells whether it is right."""
    found: str = ""
    """As a clause: ``"9.1.0"``, ``"2.13.0 does not fit torch 2.10.0"``."""
    fix: str | None = None
    """Action for the user, as a command where there is one."""


def _between_commas(text: str) -> Sequence[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """Facts about a backend that the core needs before it imports the vendor libraries."""

    name: str
    device_type: str
    """The ``torch.device`` type."""
    dist_backend: str
    """The ``torch.distributed`` backend."""
    probe: Callable[[], Availability]
    """Cheap check of the host. May import the vendor library; must not raise."""
    scheduler_resource: str
    """Name under which a scheduler counts the devices, such as ``"GPU"``, or a new name if schedulers do not
    know the device. A launcher translates it into its own options."""
    local_device: Callable[[AcceleratorIds, Mapping[str, str]], int]
    """The device index inside this process, from the ids that a scheduler assigned and the environment."""
    aliases: Sequence[str] = ()
    """Other names that ``--backend`` takes."""
    visible_devices_env: str | None = None
    """The environment variable that hides devices, or ``None`` if there is none."""
    visible_devices: Callable[[str], Sequence[str]] = _between_commas
    """The ids of the devices that a value of that variable shows, as the vendor's library reads it."""
    providers: Sequence[str] = ()
    """Libraries that a run may choose to bring modules in the place of the kernel table's, or to replace
    functions of the engine's libraries: what ``train.provider`` takes."""
    hidden_env: Mapping[str, str] = field(default_factory=dict)
    """Environment that hides the devices from the workers of another backend."""
    engine_installs: Mapping[str, str] = field(default_factory=dict)
    """How a rollout engine is installed here, as a clause, by the engine's name; without it a user is told
    the engine's usual command."""
    master_weight_bytes: int = 4
    """Bytes that the backend's optimizer keeps of a float32 weight beside its bfloat16 copy: 2 where it takes
    remainders (:class:`anygauge_hooks.optimizers.FusedOptimizer`). Plans of memory read it."""
    device_memory: Mapping[str, float] = field(default_factory=dict)
    """Kinds of devices that a plan can be for, by the name that ``--gpu`` takes, such as ``"H200"``, with the
    bytes that a driver reports of one in total. The name is a word of the driver's, in capitals."""
    profile_kinds: Sequence[str] = ()
    """Kinds of profiles beside ``torch``, which every backend has, that ``profile.kind`` takes: ``memory``,
    if torch keeps a history of allocations for the device, and those that the backend's
    :func:`~anygauge_hooks.specs.make_profiler` makes."""
    host_checks: Callable[[], Sequence[HostCheck]] | None = None
    """Checks of ``anygauge doctor`` beyond the probe. Must import neither torch nor a vendor library, so that
    it can report what is wrong with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """One key that a plugin fills in. A key that the user wrote is never changed."""

    path: str
    """Dotted path: ``"train.dtype"``."""
    value: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One thing that is wrong with a config."""

    path: str
    found: Any
    hint: str
    """Suggested value or action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFunction:
    """A function that a config can name: a reward, an estimator, a policy loss, a correction, a metric."""

    name: str
    fn: Callable[..., Any]
    inline: bool = False
    """For rewards: the function is fast and cannot hang or crash, so it may run in the driver itself."""
    kind: Literal["group", "token"] = "group"
    """For advantage estimators: from the rewards of one group, or from
    :class:`~anygauge_hooks.algorithms.AdvantageInputs`. Each rank that trains calls it."""
    needs: Sequence[Literal["values", "teacher_log_probs", "old_log_probs"]] = ()
    """For advantage estimators of kind ``token``: what they need of their inputs that not every run has. A
    critic is trained if one needs values, and the trainer's log-probs are computed before the first optimizer
    step if one needs ``old_log_probs``. For corrections: ``old_log_probs`` if they compare these with the
    rollout's, and so need the trainer's own."""
    min_samples: int = 1
    """For advantage estimators: of how many samples of a prompt there must be for it to tell them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Run properties that observers may read."""

    name: str
    directory: str
    """Run directory, absolute."""
    backend: str
    total_steps: int
    config: RunConfig
    """The resolved config."""
    step: int = 0
    """Steps finished so far."""
    devices: str = ""
    """Description of the backend's devices from a plugin (``report_environment``), if one gives it."""

    @property
    def where(self) -> str:
        """Readable name of the backend and its devices."""
        return f"{self.backend} ({self.devices})" if self.devices else self.backend


class Tracker(Protocol):
    """Receives every metric of a run, on the driver."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record ``metrics``, named ``<group>/<name>``, on the step axis of their group."""

    def close(self) -> None:
        """Flush and close the tracker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec:
    """A metrics sink that a config can name."""

    name: str
    make: Callable[[RunInfo], Tracker]


class Graph(Protocol):
    """Recorded work of a device. It keeps its memory until it is deleted."""

    def replay(self) -> None:
        """Queue all of it again: the same kernels, on the same addresses."""


CaptureGraph = Callable[[Callable[[], None]], Graph]
"""Records what a function queues. The function may be called more than once, must not wait for the device,
and leaves its results where it finds them again. By when it returns, the work may or may not have been done.

:raises RuntimeError: Some of the work cannot be recorded; the device goes on as before."""


class Device(Protocol):
    """Device functions that ``torch.accelerator`` lacks, for one device of one process.

    A capability that is absent is a value (``None`` or ``False``), never an exception. A class may inherit
    from this one: then it has the values of a device without the optional capabilities.
    """

    type: str
    """The ``torch.device`` type."""
    index: int
    torch_device: torch.device
    capture_graph: CaptureGraph | None = None
    """How work is recorded to be queued again as a whole, or ``None`` if the device cannot."""

    def seed(self, seed: int) -> None:
        """Seed the host generator and the device's."""

    def get_rng_state(self) -> Any:
        """Return the state of the device's default generator (uint8 host tensor)."""

    def set_rng_state(self, state: Any) -> None:
        """Restore a state of :meth:`get_rng_state`."""

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""

    def memory(self) -> Mapping[str, int]:
        """Return the known byte counts of ``allocated``, ``reserved``, ``free``, ``total``."""

    def peak_memory(self, *, reset: bool = False) -> int | None:
        """Return the most bytes that this process had allocated at once since the last reset, if known.

        Called around every phase of a step, so it must not take long.

        :param reset: Start to count anew, from what is allocated now.
        """
        return None

    def empty_cache(self) -> None:
        """Give cached blocks back to the system."""
        return  # mypy takes an empty body for an abstract method

    def shareable(self) -> AbstractContextManager[None]:
        """Return a context in which memory is allocated that any process of the user can map.

        A null context where all memory is so, or none.
        """
        return nullcontext()

    def meters(self) -> Mapping[str, float]:
        """Return the device's own meters; empty on many devices.

        Called once in each step. ``utilization`` (0 to 1), ``power`` (watts), ``power_capped`` and
        ``thermal_slowed`` (shares of the time in which clocks were lowered) are means since the last call,
        ``temperature`` (degrees Celsius) and ``clock`` (MHz) are read now.
        """
        return {}


class LoadedPlugins(Protocol):
    """The plugins of a process, for engines that call hooks."""

    def named(self, hook: str) -> dict[str, Any]:
        """Return the items that plugins registered through a ``register_*`` hook, by name."""

    def get(self, hook: str, name: str) -> Any:
        """Return one item that was registered through a ``register_*`` hook.

        :raises UnknownNameError: No plugin provides the name.
        """

    def find(self, hook: str, name: str) -> Any | None:
        """Return the item of :meth:`get`, or ``None`` if there is none."""

    def model(self, architectures: Sequence[str]) -> ModelSpec:
        """Return the family that registered one of the architectures of a Hugging Face config.

        :raises UnknownNameError: No plugin knows them.
        """

    def answers(self, hook: str, **arguments: Any) -> Sequence[tuple[str, Any]]:
        """Return the items of a collecting hook, each with the name of its plugin."""

    def collect(self, hook: str, **arguments: Any) -> list[Any]:
        """Return the items of a collecting hook."""

    def merged(self, hook: str, **arguments: Any) -> dict[str, Any]:
        """Return the union of the mappings of a collecting hook."""

    def first(self, hook: str, **arguments: Any) -> Any:
        """Return the first answer of a hook that is not ``None``, or ``None``."""

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call an observer hook."""

    def worker_env(
        self,
        backend: BackendSpec,
        *,
        role: str,
        deterministic: bool,
        interface: str | None,
        ip_version: str,
        timeout_s: float,
        train_engine: str | None = None,
    ) -> dict[str, str]:
        """Return the environment of a worker process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Who and where a worker process is."""

    rank: int
    world_size: int
    backend: BackendSpec
    device: Device
    plugins: LoadedPlugins
    accelerators: Sequence[str] = ()
    """Physical ids of the devices that the process was given."""
    address: str = "127.0.0.1"
    """Address of this node, for services that other nodes call; loopback on a single node."""
    logs: str | None = None
    """Directory for the logs of what the process starts; ``None`` takes that of the run."""
    media: MediaStore | None = None
    """Store of images, videos and audio; ``None`` in a text-only run."""
