"""Torch's allocator of GPU memory, and what other processes may map of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anygauge_cuda.env import ALLOCATOR_NAMES, expands

__all__ = ["shareable"]


@contextmanager
def shareable() -> Iterator[None]:
    """Let torch take memory that any process of the user can map, in the whole process, inside the block.

    Another process gets a segment that expands through the sender's file descriptors, which Linux may keep
    from all but its parent (``pidfd_getfd``); a segment of a fixed size has a handle that travels as bytes.
    Blocks that expand and are free are left alone by torch while the setting is off.
    """
    given = next((os.environ[name] for name in ALLOCATOR_NAMES if name in os.environ), "")
    if not expands(given):
        yield
        return
    choose = _setter()
    choose(f"{given},expandable_segments:False")
    try:
        yield
    finally:
        choose(given)


def _setter() -> Callable[[str], None]:
    """Return the function that changes settings at run time; torch has renamed it."""
    bindings: Any = torch._C
    set_settings: Callable[[str], None] = (
        getattr(bindings, "_accelerator_setAllocatorSettings", None)
        or bindings._cuda_cudaCachingAllocator_set_allocator_settings
    )
    return set_settings
