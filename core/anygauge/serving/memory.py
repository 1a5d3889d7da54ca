"""Memory state of one engine that shares its device with a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from anygauge.serving.client import EngineClient, MemoryPart
from anygauge_hooks.engines import MemoryState
from anygauge_hooks.errors import DeadlineError

__all__ = ["EngineMemory"]

_LOOK_S = 0.05
"""Interval of checks whether an engine is idle."""
_AWAY: Mapping[MemoryState, frozenset[MemoryPart]] = {
    "nothing": frozenset({"kv_cache", "cuda_graph", "weights"}),
    "weights": frozenset({"kv_cache", "cuda_graph"}),
    "everything": frozenset(),
}


class EngineMemory:
    """Which parts of its memory an engine has released. A server that was just started has all."""

    def __init__(self) -> None:
        self.state: MemoryState = "everything"
        self._away: frozenset[MemoryPart] = frozenset()

    async def set_state(self, client: EngineClient, state: MemoryState) -> None:
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
        self._away, self.state = wanted, state


async def _idle(client: EngineClient) -> None:
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
            f"{client.name} still had requests {limit_s:g} s after it was to make room for the trainers.",
            hint="Let nobody but the run generate with it; raise rollout.client.control_timeout_s if its "
            "requests end later.",
        ) from error
