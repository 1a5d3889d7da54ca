"""Files that explain, after a process has ended, why: beside its log and under the same name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anygauge_cuda.env import FORMER
from anygauge_hooks.errors import ConfigError

__all__ = ["HISTORY", "write_diagnosis"]

HISTORY = "ANYGAUGE_CUDA_MEMORY_HISTORY"
"""How many allocations to remember; a lack of memory then writes them down. Costs time in each."""
DUMP = "TORCH_FR_DUMP_TEMP_FILE"
"""Where torch writes the collectives that a rank waits for; the rank's number is added."""


def write_diagnosis(log: str) -> None:
    """Have torch write what a hang, or a lack of memory, leaves behind beside the log of this process.

    :raises ConfigError: The value of :data:`HISTORY` is no number.
    """
    stem = Path(log).with_suffix("")
    if FORMER[DUMP] not in os.environ:
        os.environ.setdefault(DUMP, f"{stem}.collectives-")
    entries = os.environ.get(HISTORY, "0").strip() or "0"
    if not entries.isdecimal():
        raise ConfigError(f"{HISTORY} is {entries!r}, not a number of allocations.", hint=f"{HISTORY}=100000")
    if int(entries):
        _record_memory(int(entries), stem.with_suffix(".memory.pickle"))


def _record_memory(entries: int, file: Path) -> None:
    import torch

    memory: Any = torch.cuda.memory  # of it these two are untyped

    def observer(device: int, wanted: int, allocated: int, free: int) -> None:
        del device, wanted, allocated, free
        memory._dump_snapshot(str(file))

    memory._record_memory_history(max_entries=entries)
    bindings: Any = torch._C
    bindings._cuda_attach_out_of_memory_observer(observer)
