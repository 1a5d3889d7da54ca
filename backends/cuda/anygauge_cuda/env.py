"""Environment of a worker process, and the GPU that it uses."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from anygauge_hooks.devices import VisibleDevices
from anygauge_hooks.errors import PlacementError
from anygauge_hooks.types import AcceleratorIds

__all__ = [
    "CONNECTIONS",
    "CUMEM",
    "DETERMINISTIC",
    "ENGINES",
    "FORMER",
    "GPUS",
    "HIDDEN",
    "VISIBLE_DEVICES",
    "WORKER",
    "allocator",
    "expands",
    "local_device",
    "order_of_kernels",
    "users_choice",
    "visible_devices",
]

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
CUMEM = "NCCL_CUMEM_ENABLE"
ENGINES = ("rollout", "sglang")
"""Roles of processes that generate, or own a server that does."""

WORKER: Mapping[str, str] = {
    # SGLang sets the same in its processes; between communicators of unlike memory the first broadcast hangs
    CUMEM: "0",
    # NVLink multicast, of NCCL and of torch's symmetric memory: it needs a fabric manager that grants it,
    # which containers and shared hosts often lack, and then the first collective fails
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # what each rank waits for when a collective exceeds its limit is written down before the process ends
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Trainers and servers must not differ in these."""
FORMER: Mapping[str, str] = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Older names of torch's variables, which it reads where the newer one is not set."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Allocator of trainers: sequences of all lengths fragment segments of a fixed size."""
ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch looks for settings of its allocator; the first that is set counts."""
FORWARDED = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_SYMM_MEM_", "ANYGAUGE_CUDA_", "CUDA_DEVICE_MAX_")
"""Beginnings of the user's own variables that reach the workers of every node."""
DETERMINISTIC: Mapping[str, str] = {
    # without workspaces of a fixed size cuBLAS may sum in any order, and torch refuses to multiply
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # one order of summation, of those that Megatron accepts in its deterministic mode
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Added in a deterministic run."""
HIDDEN: Mapping[str, str] = {VISIBLE_DEVICES: ""}


def local_device(ray_ids: AcceleratorIds, environ: Mapping[str, str]) -> int:
    """Return the index, inside this process, of the GPU that it was assigned.

    :param ray_ids: Indices or UUIDs (``GPU-...``, ``MIG-...``), the first of which counts.
    :param environ: The environment of the process; its visible-devices list gives the numbering.
    :raises PlacementError: There is none, the process cannot see it, or CUDA will refuse the list.
    """
    text = environ.get(VISIBLE_DEVICES, "")
    visible = visible_devices(text)
    if ray_ids and len({*visible}) < len(visible):
        raise PlacementError(
            f"A GPU is named twice: {VISIBLE_DEVICES} is {text!r}, with which CUDA finds none.",
            hint=f"Name each GPU once in {VISIBLE_DEVICES}, or leave the variable to Ray.",
        )
    return GPUS.local_index(ray_ids, environ)


def users_choice(defaults: Mapping[str, str]) -> Mapping[str, str]:
    """Return defaults, in their place or beside them what this process's environment has, for every node."""
    own = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    left = {name: value for name, value in defaults.items() if FORMER.get(name) not in own}
    return {**{name: os.environ.get(name, value) for name, value in left.items()}, **own}


def order_of_kernels(train_engine: str | None) -> Mapping[str, str]:
    """Return what makes kernels start in the order of their launch, if the train engine relies on it.

    Megatron does, to overlap the communication of tensor and sequence parallelism. FSDP gathers weights while
    it computes, for which kernels of several streams must not wait for each other.
    """
    return {CONNECTIONS: "1"} if train_engine == "megatron" else {}


def allocator(role: str) -> Mapping[str, str]:
    """Return the settings of torch's allocator in the processes of a role.

    Trainers expand segments unless the user has set something else. Processes that generate never do:
    the memory saver with which a server sleeps refuses to start beside them.
    """
    given = {name: os.environ[name] for name in ALLOCATOR_NAMES if name in os.environ}
    if role not in ENGINES:
        return given or dict((ALLOCATOR,))
    return {name: _unexpanded(value) for name, value in given.items()}


def expands(settings: str) -> bool:
    """Return whether settings of torch's allocator ask for segments that expand."""
    return _EXPANDABLE.search(settings) is not None


_NAME = re.compile(r"[0-9]+|(?:GPU|MIG)-.+")
_EXPANDABLE = re.compile(r"\s*expandable_segments\s*:\s*true\s*", re.IGNORECASE)


def _unexpanded(settings: str) -> str:
    return ",".join(each for each in settings.split(",") if not _EXPANDABLE.fullmatch(each))


def visible_devices(text: str) -> Sequence[str]:
    """Return the entries that the driver honors: those before the first that names no GPU."""
    entries = (part.strip() for part in text.split(","))
    return [*takewhile(_NAME.fullmatch, entries)]


def _is_same(entry: str, uuid: str) -> bool:
    """Return whether two name one GPU; a UUID may be cut short, and the driver takes either."""
    if entry.isdecimal() or uuid.isdecimal():
        return entry == uuid
    return uuid.startswith(entry) or entry.startswith(uuid)


GPUS = VisibleDevices("GPU", VISIBLE_DEVICES, visible_devices, _is_same)
