"""Prefill-decode disaggregation: a prefill server reads a prompt, a decode server responds.

Both are given the same request, at the same time, with the same handover. The prefill server sends its KV
cache there; the decode server fetches it and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from anygauge.serving.engine_state import PoolEngine, attempting, end_attempts
from anygauge_hooks.errors import AnygaugeError, DeadlineError, RolloutError
from anygauge_hooks.rollout import GenerateRequest
from anygauge_hooks.serving import HandoverClient

__all__ = ["Prefill", "handover"]


class Prefill:
    """Prefill of one prompt, in progress. The decode request that depends on it ends if it fails.

    :param reader: A prefill engine.
    :param rank: Data-parallel rank of it; ``None`` if it has but one.
    """

    def __init__(self, reader: PoolEngine, request: GenerateRequest, rank: int | None) -> None:
        self.attempts: set[asyncio.Timeout] = set()
        self._reader = reader
        self._client = cast(HandoverClient, reader.client)  # as all of an engine with servers of this kind
        self.handover = self._client.handover(rank)
        self._failure: AnygaugeError | None = None
        self.task = asyncio.get_running_loop().create_task(self._read(request, rank))

    @property
    def is_lost(self) -> bool:
        """Return whether it has failed."""
        return self._failure is not None

    def lost(self) -> AnygaugeError:
        """Return why it has failed."""
        assert self._failure is not None
        return self._failure

    def end(self) -> None:
        """End it, in the engine too."""
        self.task.cancel()

    async def _read(self, request: GenerateRequest, rank: int | None) -> None:
        try:
            async with attempting(self._reader):
                await self._client.read(request, self.handover, rank=rank)
        except (RolloutError, DeadlineError) as error:
            self._failure = error
            end_attempts(self)


def handover(prefills: Sequence[Prefill]) -> dict[str, Any]:
    """Return the client's arguments for requests whose prompt another engine prefills."""
    return {"handover": prefills[0].handover} if prefills else {}
