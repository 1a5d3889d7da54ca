"""Gate between rollouts and the engines: it can be closed and counts requests in flight."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from itertools import count

from anygauge.rollout.samples import check_generation
from anygauge_hooks.rollout import GenerateRequest, Generation, Generator

__all__ = ["Gate"]

AGAIN_S = 0.2
"""Seconds until engines are asked again to abort requests: one may have crossed the first abort."""


class Gate:
    """Lets requests through to the engines while it is open.

    :param generator: The engines.
    :param vocab_size: Vocabulary size of the model that they serve; ``None`` if it is not known.
    :param most: Requests that are let through at once; ``None`` for any number.
    """

    def __init__(
        self, generator: Generator, vocab_size: int | None = None, *, most: int | None = None
    ) -> None:
        self._generator = generator
        self._vocab_size = vocab_size
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._is_final = False
        self._slots = nullcontext() if most is None else asyncio.Semaphore(most)
        self.numbers = count()
        """Numbers of requests."""
        self.under_way = 0
        """Requests that the engines have."""
        self.answered = 0
        """Requests that came back."""

    @property
    def is_open(self) -> bool:
        """Whether requests pass."""
        return self._open.is_set()

    def open(self) -> None:
        """Let requests through, unless it was closed for good."""
        if not self._is_final:
            self._open.set()

    async def close(self, drain_s: float = 0.0, *, for_good: bool = False) -> None:
        """Let none through, end those that are under way, and return once the engines have none.

        :param drain_s: Longest wait for requests to end by themselves before they are aborted, in seconds.
        :param for_good: Whether it stays closed.
        """
        self._is_final |= for_good
        self._open.clear()
        if drain_s:
            await self._is_empty_within(drain_s)
        while self.under_way:
            await self._generator.abort()
            await self._is_empty_within(AGAIN_S)

    async def _is_empty_within(self, seconds: float) -> None:
        """Return once no request is under way, or after so long."""
        if self.under_way:
            self._empty.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._empty.wait()

    def shut(self) -> None:
        """Let none through; what is under way stays."""
        self._open.clear()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return what follows, as the engines' own does, once the gate is open.

        :raises RolloutError: The engines cannot serve it, or returned what is not whole.
        """
        async with self._slots:
            while not self._open.is_set():  # it may be closed again before who waits has its turn
                await self._open.wait()
            self.under_way += 1
            try:
                said = await self._generator.generate(request)
                check_generation(said, request.params.max_new_tokens, self._vocab_size)
            finally:
                self.under_way -= 1
                self.answered += 1
                if not self.under_way:
                    self._empty.set()
            return said
