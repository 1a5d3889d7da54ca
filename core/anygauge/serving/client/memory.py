"""Memory state of one engine that shares its device with a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from anygauge_hooks.errors import DeadlineError
from anygauge_hooks.serving import ClientLimits, MemoryState

__all__ = ["EngineMemory", "MemoryPart"]

MemoryPart = Literal["kv_cache", "weights", "cuda_graph"]
"""Part of an engine's memory, by SGLang's tag. Released parts come back empty."""

_LOOK_S = 0.05
"""Interval of checks whether an engine is idle."""
_AWAY: Mapping[MemoryState, frozenset[MemoryPart]] = {
    "nothing": frozenset({"kv_cache", "cuda_graph", "weights"}),
    "weights": frozenset({"kv_cache", "cuda_graph"}),
    "everything": frozenset(),
}


class _Client(Protocol):
    name: str
    options: ClientLimits

    @property
    def is_idle(self) -> bool: ...
    async def flush_cache(self) -> bool: ...
    async def release(self, parts: Iterable[MemoryPart]) -> None: ...
    async def regain(self, parts: Iterable[MemoryPart]) -> None: ...


class EngineMemory:
    """Which parts of its memory an engine has released. A server that was just started has all."""

    def __init__(self) -> None:
        self._away: frozenset[MemoryPart] = frozenset()

    async def set_state(self, client: _Client, state: MemoryState) -> None:
        """Have the engine release or restore memory, up to a memory state.

        :raises DeadlineError: It still has requests after ``control_timeout_s``.
        :raises RolloutError: It refuses.
        """
        wanted = _AWAY[state]
        if releases := wanted - self._away:
            await _idle(client)
            await client.release(releases)
        if regains := self._away - wanted:
            await client.regain(regains)
        self._away = wanted


async def _idle(client: _Client) -> None:
    """Return once an engine has no request, and has forgotten all prefixes: it would die otherwise.

    Requests that were given up here may still run there for a moment.
    """
    limit_s = client.options.control_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            while not client.is_idle or not await client.flush_cache():
                await asyncio.sleep(_LOOK_S)
    except TimeoutError as error:
        raise DeadlineError(
            f"{client.name} still had requests {limit_s:g} s after it was asked to make room for the "
            "trainers.",
            hint="Send it no requests but those of the run; raise rollout.client.control_timeout_s if its "
            "requests end later.",
        ) from error
