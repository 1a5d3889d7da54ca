"""A generator that says what a test wants, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from anygauge_hooks.rl import FinishReason
from anygauge_hooks.rollout import GenerateRequest, Generation

__all__ = ["ScriptedGenerator"]

Said = tuple[str, FinishReason] | str


class ScriptedGenerator:
    """Says one text after the other, a character for each token, as no tokenizer would write them.

    So a text that is encoded again gives other tokens than the ones that were "sampled". Each token has a
    log-probability of its own, which tells where it came from.

    :param tokenizer: In which each character of the script is a token.
    :param script: Texts, in the order of the requests, or a function of the request. A text ends with the
        end-of-sequence token unless a finish reason comes with it.
    """

    def __init__(self, tokenizer: Any, script: list[Said] | Callable[[GenerateRequest], Said]) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.requests: list[GenerateRequest] = []
        self.sampled: list[Generation] = []
        """Generations returned so far, each with all of its tokens."""
        self.cancelled: list[str] = []
        """Requests that were cancelled."""
        self.version = 0
        self.hold = asyncio.Event()
        """Generations wait for it before their last token."""
        self.hold.set()
        self.began = asyncio.Event()
        """A generation has begun."""
        self.failure: Exception | None = None
        """Raised once, by the next request."""
        self._drawn = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the next text."""
        parts = [part async for part in self.stream(request)]
        return _joined(parts)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Yield the next text, a token at a time."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        parts = list(self._parts(request))
        given = []
        try:
            for position, part in enumerate(parts):
                if position == len(parts) - 1:
                    self.began.set()
                    await self.hold.wait()
                await asyncio.sleep(0)
                given.append(part)
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.id)
            raise
        self.sampled.append(_joined(given))

    async def abort(self) -> None:
        """Do nothing: what is under way is at its end soon."""

    def _parts(self, request: GenerateRequest) -> Iterator[Generation]:
        said = self._script.pop(0) if isinstance(self._script, list) else self._script(request)
        self.requests.append(request)
        text = said if isinstance(said, str) else said[0]
        finish: FinishReason = "stop" if isinstance(said, str) else said[1]
        tokens = self._characters(text)
        if isinstance(said, str) and not any(text.endswith(stop) for stop in request.params.stop):
            tokens.append(self._tokenizer.eos_token_id)
        if len(tokens) > request.params.max_new_tokens:
            tokens, finish = tokens[: request.params.max_new_tokens], "length"
        for token in tokens:
            self._drawn += 1
            yield Generation((token,), (-self._drawn / 1024,), (self.version,), finish)
        if not tokens:
            yield Generation((), (), (), finish)

    def _characters(self, text: str) -> list[int]:
        return [token for character in text for token in self._tokenizer.encode(character)]


def _joined(parts: list[Generation]) -> Generation:
    return Generation(
        tuple(token for part in parts for token in part.tokens),
        tuple(value for part in parts for value in part.log_probs),
        tuple(version for part in parts for version in part.weight_versions),
        parts[-1].finish_reason,
    )
