"""Rollout handle: the object that a rollout function is given."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anygauge.data.media.problems import check_number
from anygauge.rollout.context import ProducerContext
from anygauge.rollout.function_clock import OwnTime
from anygauge.rollout.gate import Gate
from anygauge.rollout.journal import Journal, Record
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import Draft, GenerateRequest, Generation
from anygauge_hooks.settings import RolloutSettings

__all__ = ["LiveRollout"]

MOST_EMPTY = 1000
"""Times in a row that engines may cut a generation short without a token before that is an error."""


class LiveRollout:
    """See :class:`anygauge_hooks.rollout.Rollout`. Kept from the draw of its prompt until its group is done.

    :param gate: To the engines.
    :param number: Number of its group: how many prompts were drawn before it in the run.
    :param place: Place of the rollout in its group.
    :param seed: Seed of its first generation.
    :param journal: Journal of its earlier generations, to which new ones are added.
    :param samples: Samples of a rollout that is done.
    """

    def __init__(
        self,
        context: ProducerContext,
        gate: Gate,
        prompt: Prompt,
        number: int,
        place: int,
        seed: int,
        journal: Journal | None = None,
        samples: tuple[Sample, ...] = (),
    ) -> None:
        shared = context.rollout_context
        self.config: RolloutSettings = shared.config
        self.engines = shared.engines
        self.tokenizer = shared.text.tokenizer
        self.max_media = shared.text.max_media
        self.max_context_tokens = shared.text.context
        self.params = context.params
        self.remaining = context.params.max_new_tokens
        self.prompt = prompt
        self.number = number
        self.place = place
        self.seed = seed
        self.journal = Journal() if journal is None else journal
        self.samples = samples
        self.own_time = OwnTime()
        self.failure: Exception | None = None
        """Error of a generation; it ends the run if the rollout function does not catch it."""
        self._group = f"{context.name}{number}"
        self.session = f"{self._group}-{place}"
        self._text = shared.text
        self._gate = gate
        self._calls = 0

    # -------------------------------------------------------------------------
    # Tokens
    # -------------------------------------------------------------------------

    def draft(self, tokens: Sequence[int] | None = None, media: Sequence[Media] = ()) -> Draft:
        """Return the beginning of a sample."""
        if tokens is None:
            tokens, media = self.prompt.tokens, self.prompt.media
        return Draft(self, self.prompt, self.seed, tokens, media)

    def spend(self, tokens: Sequence[int], media: Sequence[Media] = (), *, shown: int = 0) -> bool:
        """Take tokens that the policy did not sample off the budget, if it has as many."""
        check_number(shown + len(media), self.max_media)
        self._check_text(tokens, media)
        if len(tokens) > self.remaining:
            return False
        self.remaining -= len(tokens)
        return True

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text."""
        return self._text.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._text.decode(tokens)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation."""
        return self._text.chat(messages, tools)

    def next_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return what follows an answer."""
        return self._text.next_turn(messages)

    async def look(
        self, messages: Sequence[Mapping[str, Any]], *, chat: bool = True
    ) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """Return what follows an answer where messages show media."""
        return await asyncio.to_thread(self._text.look, messages, self.prompt, chat=chat)

    def _check_text(self, tokens: Sequence[int], media: Sequence[Media]) -> None:
        """Refuse tokens that hold the place of a medium that is not there.

        :raises RolloutError: There is one, as where a tool's text is that of such a token.
        """
        spans = [span for medium in media for span in medium.spans]
        shown = {place for start, size in spans for place in range(start, start + size)}
        held = {place for place, token in enumerate(tokens) if token in self.params.forbidden}
        if stray := sorted(held - shown):
            raise RolloutError(
                f"Token {tokens[stray[0]]} added to a sample, at {stray[0]}, is a placeholder of a "
                "medium, but no medium is given for it.",
                hint="Show media with rollout.look(messages); keep the token's text out of what tools say.",
            )

    # -------------------------------------------------------------------------
    # Generation
    # -------------------------------------------------------------------------

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        media: Sequence[Media] = (),
    ) -> Generation:
        """Return what the policy says after some tokens."""
        asked, shown = tuple(tokens), tuple(media)
        check_number(len(shown), self.max_media)
        call, self._calls = self._calls, self._calls + 1
        limit = self._room(asked, max_new_tokens)
        if limit < 1:
            return Generation((), (), (), "length")
        record = self.journal.claim(asked, tuple(stop), tuple([medium.key for medium in shown]))
        self.remaining -= limit
        self.own_time.pause()
        try:
            await self._complete(record, call, limit, shown)
        except Exception as error:  # foreign code: a rollout engine
            self.failure = error
            raise
        finally:
            self.own_time.resume()
            self.remaining += max(0, limit - len(record.said.tokens))
        return record.said

    def _room(self, asked: tuple[int, ...], max_new_tokens: int | None) -> int:
        if not asked:
            raise RolloutError(
                "Generation needs at least one token to continue from.", hint="Begin with the prompt's."
            )
        if max_new_tokens is not None and max_new_tokens < 1:
            raise RolloutError(
                f"max_new_tokens = {max_new_tokens} asks for nothing.",
                hint="Ask for at least 1, or for None.",
            )
        wanted = self.remaining if max_new_tokens is None else min(max_new_tokens, self.remaining)
        context = self.max_context_tokens
        return wanted if context is None else min(wanted, context - len(asked))

    async def _complete(self, record: Record, call: int, limit: int, shown: tuple[Media, ...]) -> None:
        """Let the engines go on until the record is done, within exactly ``limit`` tokens."""
        params = self.params
        if record.stop:
            params = replace(params, stop=(*params.stop, *record.stop))
        if len(record.said.tokens) > limit:
            record.said = record.said.cut(limit, "length")
        empty = 0
        while record.said.finish_reason == "abort":
            have = len(record.said.tokens)
            if have == limit:
                record.said = record.said.cut(limit, "length")
                return
            if params.max_new_tokens != limit - have:
                params = replace(params, max_new_tokens=limit - have)
            part = await self._gate.generate(self._request(record, call, params, shown))
            record.said = record.said.then(part)
            if have:
                record.said = self._text.cut_at_stop(record.said, have, params.stop)
            empty = 0 if part.tokens else empty + 1
            if empty > MOST_EMPTY:
                raise RolloutError(
                    f"The engines cut a generation short {empty} times without a token.",
                    hint="See their logs; something outside the run may be aborting its requests.",
                )

    def _request(
        self, record: Record, call: int, params: SamplingParams, shown: tuple[Media, ...]
    ) -> GenerateRequest:
        have = len(record.said.tokens)
        return GenerateRequest(
            id=f"{self.session}-{next(self._gate.numbers)}",
            tokens=record.asked + record.said.tokens,
            params=params,
            seed=self.seed if not (call or have) else _derived(self.seed, call, have),
            session=self.session,
            group=self._group,
            media=shown,
            order=(self.number, self.place, call),
            source=self.prompt.source,
        )


def _derived(seed: int, call: int, have: int) -> int:
    """Return the seed of what is not the beginning of a rollout: its own, so that no draw is used twice."""
    digest = hashlib.blake2b(f"{seed}/{call}/{have}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
