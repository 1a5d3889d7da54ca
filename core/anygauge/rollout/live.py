"""Rollout handle: the object that a rollout function is given."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anygauge.data.media.problems import check_number
from anygauge.rollout.function_clock import FunctionClock
from anygauge.rollout.gate import Gate
from anygauge.rollout.journal import Journal, Record
from anygauge.rollout.samples import SampleDraft
from anygauge.rollout.text import TextTools
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation, Generator

if TYPE_CHECKING:
    from anygauge.config.schema import Rollout as RolloutConfig

__all__ = ["LiveRollout"]

MOST_EMPTY = 1000
"""Times in a row that engines may cut a generation short without a token before that is an error."""


class LiveRollout:
    """See :class:`anygauge_hooks.rollout.Rollout`.

    :param name: Of the rollout, unique in the run.
    :param group: Of the rollouts of its prompt.
    :param order: Numbers of its group and of the rollout in it.
    :param config: The table of the config.
    :param gate: To the engines.
    :param journal: What was said before; what is said goes there.
    :param engines: Of other models, by name.
    """

    def __init__(
        self,
        name: str,
        prompt: Prompt,
        seed: int,
        params: SamplingParams,
        *,
        group: str | None = None,
        order: tuple[int, ...] = (),
        config: RolloutConfig,
        gate: Gate,
        text: TextTools,
        journal: Journal,
        engines: Mapping[str, Generator] | None = None,
    ) -> None:
        self.config = config
        self.params = params
        self.engines = engines or {}
        self._name = name
        self._group = group
        self._order = order
        self._prompt = prompt
        self._seed = seed
        self._gate = gate
        self._text = text
        self._journal = journal
        self._left = params.max_new_tokens
        self._calls = 0
        self._clock: FunctionClock | None = None
        self._task: asyncio.Task[Any] | None = None
        self._generating = 0

    # -------------------------------------------------------------------------
    # Tokens
    # -------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self._text.tokenizer

    @property
    def max_media(self) -> int | None:
        """Most media of one conversation."""
        return self._text.max_media

    @property
    def max_context_tokens(self) -> int | None:
        """Most tokens that the model can take."""
        return self._text.context

    @property
    def remaining(self) -> int:
        """Tokens that are left."""
        return self._left

    def draft(self, tokens: Sequence[int] | None = None, media: Sequence[Media] = ()) -> LiveDraft:
        """Return the beginning of a sample."""
        if tokens is None:
            tokens, media = self._prompt.tokens, self._prompt.media
        return LiveDraft(self, SampleDraft(self._prompt, tokens, self._seed, media))

    def spend(self, count: int) -> bool:
        """Take tokens off the budget, if it has as many."""
        if count > self._left:
            return False
        self._left -= count
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
        return await asyncio.to_thread(self._text.look, messages, self._prompt, chat=chat)

    def check_text(self, tokens: Sequence[int], media: Sequence[Media]) -> None:
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
        self._left -= limit
        record = self._journal.claim(asked, tuple(stop), tuple(medium.key for medium in shown))
        self._generating += 1
        self.reset_clock()
        try:
            await self._complete(record, call, limit, shown)
        finally:
            self._generating -= 1
            self.reset_clock()
            self._left += limit - min(limit, len(record.tokens))
        return record.whole()

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
        wanted = self._left if max_new_tokens is None else min(max_new_tokens, self._left)
        return wanted if self._text.context is None else min(wanted, self._text.context - len(asked))

    async def _complete(self, record: Record, call: int, limit: int, shown: tuple[Media, ...]) -> None:
        """Let the engines go on until the record is done, within exactly ``limit`` tokens."""
        params = self.params
        if record.stop:
            params = replace(params, stop=(*params.stop, *record.stop))
        if len(record.tokens) > limit:
            record.cut(limit)
            record.finish_reason = "length"
        empty = 0
        while record.finish_reason is None:
            have = len(record.tokens)
            if have == limit:
                record.finish_reason = "length"
                return
            if params.max_new_tokens != limit - have:
                params = replace(params, max_new_tokens=limit - have)
            part = await self._gate.generate(self._request(record, call, params, shown))
            record.add(part)
            if have and self._text.cut_at_stop(record, have, params.stop):
                record.finish_reason = "stop"
            elif part.finish_reason != "abort":
                record.finish_reason = part.finish_reason
            empty = 0 if part.tokens else empty + 1
            if empty > MOST_EMPTY:
                self._gate.failure = RolloutError(
                    f"The engines cut a generation short {empty} times without a token.",
                    hint="See their logs; something outside the run may be aborting its requests.",
                )
                raise self._gate.failure

    def _request(
        self, record: Record, call: int, params: SamplingParams, shown: tuple[Media, ...]
    ) -> GenerateRequest:
        have = len(record.tokens)
        return GenerateRequest(
            id=f"{self._name}-{self._gate.number()}",
            tokens=record.asked + tuple(record.tokens),
            params=params,
            seed=self._seed if not (call or have) else _derived(self._seed, call, have),
            session=self._name,
            group=self._group,
            media=shown,
            order=(*self._order, call),
            source=self._prompt.source,
        )

    # -------------------------------------------------------------------------
    # Time
    # -------------------------------------------------------------------------

    def bound(self, clock: FunctionClock, task: asyncio.Task[Any]) -> None:
        """Let a clock cancel the function if it takes too long for itself; its time begins now."""
        self._clock, self._task = clock, task
        self.reset_clock()

    def reset_clock(self) -> None:
        """Count the function's time from now on; not at all while the policy speaks."""
        if self._clock is None or self._task is None:
            return
        if self._generating:
            self._clock.stop(self._task)
        else:
            self._clock.start(self._task)


class LiveDraft:
    """See :class:`anygauge_hooks.rollout.Draft`."""

    def __init__(self, rollout: LiveRollout, draft: SampleDraft) -> None:
        self._rollout = rollout
        self._draft = draft

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and all that follows it."""
        return self._draft.tokens

    @property
    def media(self) -> tuple[Media, ...]:
        """All that was shown."""
        return self._draft.media

    async def generate(self, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Generation:
        """Let the policy go on, and return what it added."""
        said = await self._rollout.generate(
            self.tokens, max_new_tokens=max_new_tokens, stop=stop, media=self.media
        )
        self._draft.add(said)
        return said

    def observe(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> bool:
        """Add tokens that the policy did not sample, and what is shown among them."""
        check_number(len(self._draft.media) + len(media), self._rollout.max_media)
        self._rollout.check_text(tokens, media)
        if not self._rollout.spend(len(tokens)):
            return False
        self._draft.add_observation(tokens, media)
        return True

    def sample(self, *, text: str | None = None, metadata: Mapping[str, Any] | None = None) -> Sample:
        """Return the sample."""
        said = self._rollout.decode(self._draft.response) if text is None else text
        return self._draft.finished(said, {} if metadata is None else dict(metadata))


def _derived(seed: int, call: int, have: int) -> int:
    """Return the seed of what is not the beginning of a rollout: its own, so that no draw is used twice."""
    digest = hashlib.blake2b(f"{seed}/{call}/{have}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
