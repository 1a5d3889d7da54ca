"""A generator that says what a test wants, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
        """Generations wait for it."""
        self.hold.set()
        self.began = asyncio.Event()
        """A generation has begun."""
        self.failure: Exception | None = None
        """Raised once, by the next request."""
        self._drawn = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the next text."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        said = self._said(request)
        self.began.set()
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        self.sampled.append(said)
        return said

    async def abort(self) -> None:
        """Do nothing: what is under way is at its end soon."""

    def _said(self, request: GenerateRequest) -> Generation:
        said = self._script.pop(0) if isinstance(self._script, list) else self._script(request)
        self.requests.append(request)
        text = said if isinstance(said, str) else said[0]
        finish: FinishReason = "stop" if isinstance(said, str) else said[1]
        tokens = self._characters(text)
        if isinstance(said, str) and not any(text.endswith(stop) for stop in request.params.stop):
            tokens.append(self._tokenizer.eos_token_id)
        if len(tokens) > request.params.max_new_tokens:
            tokens, finish = tokens[: request.params.max_new_tokens], "length"
        count = len(tokens)
        first, self._drawn = self._drawn + 1, self._drawn + count
        log_probs = tuple(-number / 1024 for number in range(first, first + count))
        return Generation(tuple(tokens), log_probs, (self.version,) * count, finish)

    def _characters(self, text: str) -> list[int]:
        return [token for character in text for token in self._tokenizer.encode(character)]
