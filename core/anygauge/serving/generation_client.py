"""Generation client: sends single requests to engines from an event loop beside the driver's thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from anygauge.runtime.event_loop import EventLoop
from anygauge_hooks.rollout import Generator

__all__ = ["GenerationClient", "Wait"]

Wait = Callable[[Coroutine[Any, Any, Any], str], Any]
"""Function that runs a coroutine, described by a text, and returns its result."""


@dataclass(frozen=True, slots=True)
class GenerationClient:
    """How requests get to the engines of a run."""

    generator: Generator
    loop: EventLoop
    """Event loop that the generator belongs to."""
    wait: Wait
    """For what runs in the loop, with an eye on the engines."""
    others: Mapping[str, Generator] = field(default_factory=dict)
    """Engines of other models than the one that is trained, by its name."""
    overlaps: bool = True
    """Whether engines generate while groups are scored."""
    pause: Callable[[], None] | None = None
    """Keeps new requests waiting until the next weight update; ``None`` if engines keep requests over it."""
