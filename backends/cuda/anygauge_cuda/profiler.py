"""History of torch's allocations on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["memory_profile"]

EVENTS = 1_000_000
"""Most allocations and frees that are kept; of more, the latest."""


@contextmanager
def memory_profile(path: str) -> Iterator[None]:
    """Record every allocation of the block with its stack.

    :param path: Path of the snapshot, without ``.pickle``; https://pytorch.org/memory_viz draws it.
    """
    torch.cuda.memory._record_memory_history(max_entries=EVENTS)
    try:
        yield
        torch.cuda.memory._dump_snapshot(f"{path}.pickle")  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
