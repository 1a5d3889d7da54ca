"""In-flight model request: its generations, whoever waits for them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anygauge.rollout.gateway.refusals import Refusal
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rl import FinishReason
from anygauge_hooks.rollout import GenerateRequest, Generation, Generator

__all__ = ["Choice", "Sampling"]

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass
class Choice:
    """One generation, so far."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "abort"

    def add(self, part: Generation) -> None:
        """Append tokens.

        :raises RolloutError: The engine did not give a log-probability and a version for each.
        """
        if not len(part.tokens) == len(part.log_probs) == len(part.weight_versions):
            raise RolloutError(
                f"The engine returned {len(part.tokens)} tokens, {len(part.log_probs)} log-probabilities and "
                f"{len(part.weight_versions)} weight versions for request {self.request.id}.",
                hint="Each token needs one of both; correct the Generator.",
            )
        self.tokens += part.tokens
        self.log_probs += part.log_probs
        self.weight_versions += part.weight_versions
        self.finish_reason = part.finish_reason

    def onward(self) -> GenerateRequest | None:
        """Return the request that continues from here, or ``None`` if there is no room for another token."""
        left = self.request.params.max_new_tokens - len(self.tokens)
        if left <= 0:
            return None
        params = replace(self.request.params, max_new_tokens=left)
        return self.request._replace(tokens=self.request.tokens + tuple(self.tokens), params=params)


class Sampling:
    """The generations of one request, which go on while at least one handler waits for them.

    :param ended: Called with each choice and its number, once, when it has ended; makes its answer.
    :param failed: Called with what the engine raises.
    """

    def __init__(
        self,
        generator: Generator,
        requests: Sequence[GenerateRequest],
        *,
        timeout_s: float,
        ended: Callable[[int, Choice], Any],
        failed: Callable[[Exception], None],
    ) -> None:
        self.name = secrets.token_hex(12)
        self.delivered = False
        """Whether a handler has written all of it to its client."""
        self._generator = generator
        self._requests = requests
        self._timeout_s = timeout_s
        self._ended = ended
        self._failed = failed
        self._waiting = 0
        self._given_up = False
        self._task = asyncio.create_task(self._run())
        # whoever waits gets what it raises; nobody may
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def done(self) -> bool:
        """Whether it has ended in any way."""
        return self._task.done()

    @property
    def awaited(self) -> bool:
        """Whether a handler waits for it."""
        return self._waiting > 0

    @property
    def failed(self) -> bool:
        """Whether it was cancelled or raised."""
        if self._given_up or not self.done:
            return self._given_up
        return self._task.cancelled() or self._task.exception() is not None

    async def __aenter__(self) -> Sampling:
        self._waiting += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._waiting -= 1
        if not self._waiting and not self._task.done():
            await self.cancel()

    async def cancel(self) -> None:
        """End it, in the engine too."""
        self._given_up = True
        self._task.cancel()
        await asyncio.wait([self._task])

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call a function when it has ended in any way."""
        self._task.add_done_callback(lambda _: callback())

    async def answers(self) -> list[Any]:
        """Return the answers, once every choice has ended.

        :raises RolloutError: The engine cannot serve it.
        :raises DeadlineError: It took too long.
        :raises Refusal: It was given up.
        """
        await asyncio.wait([self._task])
        if self._task.cancelled():
            raise Refusal(503, "The session was closed.")
        return self._task.result()

    async def _run(self) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                answers = [group.create_task(self._answer(*each)) for each in enumerate(self._requests)]
        except TimeoutError as error:
            raise DeadlineError(
                f"The engine did not answer request {self._requests[0].id} in {self._timeout_s:g} s.",
                hint="Raise rollout.gateway.timeout_s, or lower rollout.max_new_tokens.",
            ) from error
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            self._failed(first)
            raise first from first.__cause__
        return [answer.result() for answer in answers]

    async def _answer(self, number: int, request: GenerateRequest) -> Any:
        return self._ended(number, await self._generate(request))

    async def _generate(self, request: GenerateRequest) -> Choice:
        choice = Choice(request)
        pause_s = _FIRST_PAUSE_S
        onward: GenerateRequest | None = request
        while onward is not None:
            part = await self._generator.generate(onward)
            choice.add(part)
            if choice.finish_reason != "abort":
                return choice
            # Weights are being exchanged: the agent must not notice, so the generation goes on afterwards.
            pause_s = _FIRST_PAUSE_S if part.tokens else min(2 * pause_s, _LONGEST_PAUSE_S)
            onward = choice.onward()
            if onward is not None:
                await asyncio.sleep(pause_s)
        choice.finish_reason = "length"
        return choice
