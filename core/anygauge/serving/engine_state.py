"""State of an engine in a pool, and the end of its in-flight requests when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Literal, NamedTuple, Protocol

from anygauge.serving.load_balancer import Load
from anygauge_hooks.errors import DeadlineError
from anygauge_hooks.serving import ClientLimits, EngineAwayError, EngineClient, MemoryState, ServerKind

__all__ = [
    "DisplacedError",
    "EngineReport",
    "EngineState",
    "PoolEngine",
    "attempting",
    "end_attempts",
    "retry_pause_s",
]

EngineState = Literal["serving", "paused", "asleep", "unusable", "dead"]
"""``paused``: keeps its requests and gets no new ones. ``asleep``: has released memory, see
:meth:`EnginePool.set_memory_state`. ``unusable``: its weights cannot be trusted, so its requests go to other
engines, as for ``dead``."""
LOST = ("unusable", "dead")
_LONGEST_PAUSE_S = 10.0
_jitter = Random()
"""Separate random generator, so that a retry draws no random number of the run."""


class EngineReport(NamedTuple):
    """State of one engine in a pool."""

    state: EngineState
    address: str
    reason: str
    """Why it is not serving; empty if it is."""
    loads: list[Load]
    """Per data-parallel rank; empty for one that requests do not go to."""
    kind: ServerKind = "regular"


class DisplacedError(EngineAwayError):
    """The engine was given up while it had the request."""


class _Holder(Protocol):
    """Resource that an attempt depends on."""

    attempts: set[asyncio.Timeout]
    """Each ends when it is brought forward."""

    @property
    def is_lost(self) -> bool: ...

    def lost(self) -> Exception:
        """Return why the attempt ends."""


@dataclass(eq=False, slots=True)
class PoolEngine:
    """An engine in a pool."""

    name: str
    client: EngineClient
    ranks: int
    kind: ServerKind = "regular"
    state: EngineState = "serving"
    reason: str = ""
    probe: asyncio.Task[None] | None = None
    """Health probe in progress; the engine gets no new requests meanwhile."""
    watch: asyncio.Task[None] | None = None
    memory_state: MemoryState = "everything"
    awake: EngineState = "serving"
    """State that a sleeping engine returns to when it wakes up."""
    attempts: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts of its in-flight requests."""
    writes_profile: bool = False
    """Whether it writes a profile: SGLang makes no token meanwhile, for a minute or more."""

    @property
    def is_lost(self) -> bool:
        """Return whether its requests are retried elsewhere."""
        return self.state in LOST

    def lost(self) -> DisplacedError:
        """Return why a request has to go elsewhere."""
        return DisplacedError(f"{self.client.name} is {self.state}: {self.reason}")


def end_attempts(holder: _Holder) -> None:
    """Cancel the attempts that depend on a lost engine or rank."""
    now = asyncio.get_running_loop().time()
    for attempt in holder.attempts:
        if not attempt.expired():  # it ends already, and may not be told so again
            attempt.reschedule(now)


@asynccontextmanager
async def attempting(*holders: _Holder) -> AsyncIterator[None]:
    """Run the block until one of those that it depends on is lost; then raise why."""
    for holder in holders:
        if holder.is_lost:
            raise holder.lost()
    limit = asyncio.timeout(None)
    try:
        async with limit:
            for holder in holders:
                holder.attempts.add(limit)
            yield
    except TimeoutError as error:
        if limit.expired() and not isinstance(error, DeadlineError):
            lost = [holder for holder in holders if holder.is_lost] or holders
            raise lost[0].lost() from error
        raise
    finally:
        for holder in holders:
            holder.attempts.discard(limit)


def retry_pause_s(options: ClientLimits, failures: int) -> float:
    """Return how long to wait before the next attempt: full jitter below a bound that doubles."""
    return _jitter.uniform(0, min(options.pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S))
