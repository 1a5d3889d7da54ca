"""Garbage collection without the many objects of torch and Megatron."""

from __future__ import annotations

import atexit
import gc

__all__ = ["freeze_living_objects", "skip_last_collection"]

_NEW_OBJECTS = 100_000
"""New objects at which Python looks for cycles. A thousand rollouts make some sixty thousand, and nearly all
of them are freed without a collection when their step is over."""


def freeze_living_objects() -> None:
    """Leave every object that lives now out of later garbage collections, and collect less often.

    A full collection visits the objects of all imported modules, and no thread runs for a fifth of a second.
    What dies later in a cycle is never freed, so this is for a process with a single run.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def skip_last_collection() -> None:
    """Let this process end without a last search for cycles, which takes up to a second."""
    atexit.register(gc.freeze)
