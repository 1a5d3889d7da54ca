"""Environment of a worker process, and the NPU that it uses."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from itertools import takewhile

from anygauge_hooks.devices import VisibleDevices

__all__ = [
    "ALLOCATOR",
    "AUTOLOAD",
    "BUFFER",
    "DETERMINISTIC",
    "HIDDEN",
    "LOADED",
    "NPUS",
    "SERVER",
    "VISIBLE_DEVICES",
    "WORKER",
    "import_vendor",
    "timeouts",
    "users_choice",
    "visible_devices",
]

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Whether ``import torch`` loads torch-npu too. This backend imports it by name, so either will do."""
BUFFER = "HCCL_BUFFSIZE"

WORKER: Mapping[str, str] = {
    # several processes on one NPU or host must not ask for the same listening ports; all members of a group
    # need the same setting, so trainers and servers get it
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    # megabytes that each end of a communicator holds twice, for sending and for receiving: HCCL's own
    # default, written down because trainers and servers must not differ
    BUFFER: "200",
}
ALLOCATOR: Mapping[str, str] = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
"""Allocator of trainers: sequences of all lengths fragment fixed segments. A server's memory saver has its
own allocator, so servers are left as they are. With ``max_split_size_mb`` or ``garbage_collection_threshold``
torch-npu refuses it."""
SERVER: Mapping[str, str] = {"SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": "1"}
"""Weights of servers stay in torch's layout.

By default SGLang casts the experts' weights, those of MLA and quantized ones to CANN's FRACTAL_NZ after it
has loaded them. Begin and end of an update restore that of CUDA's packed formats only, so an update would
copy plain rows into slices of such a tensor. vllm-ascend refuses an RL server whose weights are in FRACTAL_NZ
(``NPUWorker.wake_up``)."""
DETERMINISTIC: Mapping[str, str] = {
    # reductions of the two communication libraries in one order
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    # matrix products: no shift along K, no shuffle of it, and none that overlaps with communication
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
}
"""Added in a deterministic run."""
LOADED: Mapping[str, str] = {AUTOLOAD: "1"}
"""Whatever the shell of the driver says: SGLang takes torch-npu for loaded."""
HIDDEN: Mapping[str, str] = {VISIBLE_DEVICES: "", AUTOLOAD: "0"}
CONNECT_S = (120, 7200)
"""Range of ``HCCL_CONNECT_TIMEOUT``, which bounds how long the members of a group wait for one another."""
EVENT_MARGIN_S = 32
"""Seconds by which torch-npu's wait for the device outlasts HCCL's, as their defaults of 1868 and 1836 s do:
HCCL's message names the collective."""


def import_vendor() -> None:
    """Import torch-npu, also where torch was told not to load extensions by itself."""
    importlib.import_module("torch_npu")


def timeouts(timeout_s: float) -> Mapping[str, str]:
    """Return the variables that end a collective that never comes, where HCCL waits for it on the device.

    :param timeout_s: Longest wait for a collective. The shortest that HCCL takes for a connection is longer
        than that of a short run, which torch's own timeout of the group then ends.
    """
    waits = max(1, math.ceil(timeout_s))
    connects = min(max(waits, CONNECT_S[0]), CONNECT_S[1])
    return {
        "HCCL_CONNECT_TIMEOUT": str(connects),
        "HCCL_EXEC_TIMEOUT": str(waits),
        "HCCL_EVENT_TIMEOUT": str(waits + EVENT_MARGIN_S),
    }


def users_choice(defaults: Mapping[str, str]) -> Mapping[str, str]:
    """Return defaults, with the values of this process's environment where it has some, for every node."""
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def visible_devices(text: str) -> Sequence[str]:
    """Return the entries that CANN honors: those before the first that is no index."""
    entries = (part.strip() for part in text.split(","))
    return [str(int(entry)) for entry in takewhile(str.isdecimal, entries)]


NPUS = VisibleDevices("NPU", VISIBLE_DEVICES, visible_devices)
