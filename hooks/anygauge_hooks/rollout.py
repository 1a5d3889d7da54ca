"""Interfaces between rollout control, engines that answer single requests, and their servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from anygauge_hooks.rl import NO_VERSION, Sample

if TYPE_CHECKING:
    from anygauge_hooks.media import Media
    from anygauge_hooks.rl import FinishReason, Prompt, SamplingParams
    from anygauge_hooks.settings import RolloutSettings

__all__ = ["SESSION", "Draft", "GenerateRequest", "Generation", "Generator", "Rollout"]

SESSION: ContextVar[str | None] = ContextVar("session", default=None)
"""Session of the rollout that the current task works for, as in :attr:`GenerateRequest.session`."""


class GenerateRequest(NamedTuple):
    """Tokens to go on from, and how.

    Example::

        GenerateRequest(id="7-0-0", tokens=(5, 11, 2), params=SamplingParams(max_new_tokens=64), seed=1234)
    """

    id: str
    """Unique in the run; an engine knows the request by it."""
    tokens: tuple[int, ...]
    """The prompt, and what there is of the response."""
    params: SamplingParams
    """``max_new_tokens`` counts from here on."""
    seed: int
    """Seed for engines that can draw the same tokens again; others ignore it."""
    session: str | None = None
    """Requests of one session begin alike: they are sent to the engine that has read their beginning."""
    group: str | None = None
    """Sessions of one group begin alike: a new one is sent where another's beginning was read."""
    media: tuple[Media, ...] = ()
    """In the order of their placeholders in ``tokens``."""
    order: tuple[int, ...] = ()
    """Numbers of its group, its rollout and the generation in it. Engines that answer requests in batches
    sort by it, so that a batch is a function of the requests alone."""
    source: str = ""
    """Data row of the prompt, for messages: ``train.jsonl:4``."""

    @property
    def label(self) -> str:
        """Name in messages: the id and the data row."""
        return f"{self.id} ({self.source})" if self.source else self.id


class Generation(NamedTuple):
    """Generated tokens of a request; each field but the last has one entry per token."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-probs at the sampling temperature."""
    weight_versions: tuple[int, ...]
    """Version of the weights that sampled each token."""
    finish_reason: FinishReason
    """``"abort"`` where it was cut short: a request with these tokens at its end goes on from here."""

    def then(self, part: Generation) -> Generation:
        """Return this and what follows it as one; a first part is returned as it is."""
        if not self.tokens:
            return part
        return Generation(
            self.tokens + part.tokens,
            self.log_probs + part.log_probs,
            self.weight_versions + part.weight_versions,
            part.finish_reason,
        )

    def cut(self, length: int, finish_reason: FinishReason) -> Generation:
        """Return the first tokens alone."""
        return Generation(
            self.tokens[:length], self.log_probs[:length], self.weight_versions[:length], finish_reason
        )


class Generator(Protocol):
    """Rollout engines, asked for one generation at a time by any number of coroutines.

    All engines are asked through it: servers answer each request by itself, and engines in worker processes
    (:class:`anygauge_hooks.engines.RolloutEngine`) those that wait together.
    """

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate a continuation of the request's tokens.

        Cancelling the call ends the request in the engine too.

        :raises RolloutError: The request cannot be served, or no engine is left to serve it.
        """

    async def abort(self) -> None:
        """Abort all generations in flight; each returns its tokens so far, with finish reason ``"abort"``."""


class Draft:
    """A sample under construction: a prompt and the tokens after it so far.

    :param rollout: Generates, and has the budget.
    :param tokens: The sample's prompt, with ``media`` among them.
    """

    def __init__(
        self,
        rollout: Rollout,
        prompt: Prompt,
        seed: int,
        tokens: Sequence[int],
        media: Sequence[Media] = (),
    ) -> None:
        self._rollout = rollout
        self._prompt = prompt
        self._seed = seed
        self._prompt_tokens = tuple(tokens)
        self._response = Generation((), (), (), "stop")
        self._loss_mask: tuple[int, ...] = ()
        self.media = tuple(media)
        """Media of the prompt and of later messages; spans count from the prompt's first token."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and all that follows it."""
        return self._prompt_tokens + self._response.tokens

    async def generate(self, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Generation:
        """Let the policy continue the draft, and return its tokens, as :meth:`Rollout.generate`."""
        said = await self._rollout.generate(
            self.tokens, max_new_tokens=max_new_tokens, stop=stop, media=self.media
        )
        self._response = self._response.then(said)
        self._loss_mask += (1,) * len(said.tokens)
        return said

    def observe(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> bool:
        """Add tokens that the policy did not sample, with a loss mask of 0, and take them off the budget.

        Example::

            seen = [{"type": "image", "image": png}]
            draft.observe(*await rollout.look([{"role": "tool", "content": seen}]))

        :param media: Shown among them; their spans count from the first of ``tokens``.
        :returns: Whether the budget had room for them; if not, nothing was added.
        :raises MediaError: The sample would have more media than :attr:`Rollout.max_media`.
        """
        if not self._rollout.spend(tokens, media, shown=len(self.media)):
            return False
        before, count = len(self.tokens), len(tokens)
        told = tuple(tokens), (0.0,) * count, (NO_VERSION,) * count
        self._response = self._response.then(Generation(*told, self._response.finish_reason))
        self._loss_mask += (0,) * count
        self.media += tuple(medium.moved(before) for medium in media)
        return True

    def sample(self, *, text: str | None = None, metadata: Mapping[str, Any] | None = None) -> Sample:
        """Return the sample.

        :param text: Text to score; ``None`` takes all that follows the prompt, special tokens left out.
        :param metadata: Kept with the sample.
        """
        tokens, log_probs, weight_versions, finish_reason = self._response
        return Sample(
            prompt_index=self._prompt.index,
            prompt_tokens=self._prompt_tokens,
            response_tokens=tokens,
            log_probs=log_probs,
            loss_mask=self._loss_mask,
            weight_versions=weight_versions,
            text=self._rollout.decode(tokens) if text is None else text,
            finish_reason=finish_reason,
            seed=self._seed,
            metadata=dict(metadata or {}),
            media=self.media,
        )


class Rollout(Protocol):
    """Argument of a rollout function: the policy, and the state of one rollout.

    Example::

        async def twice(rollout, prompt, seed):
            draft = rollout.draft()
            await draft.generate(stop=["?"])
            draft.observe(rollout.encode("Think again. "))
            await draft.generate()
            return draft.sample()
    """

    config: RolloutSettings
    """The table ``[rollout]`` of the config; what is its own to one rollout is in :attr:`params`."""
    params: SamplingParams
    """How tokens are drawn."""
    tokenizer: Any
    """The model's Hugging Face tokenizer."""
    engines: Mapping[str, Generator]
    """Engines of other models, by the names that ``[[rollout.groups]]`` gives them. What they take counts as
    the function's own time, and their tokens for no budget."""

    @property
    def max_media(self) -> int | None:
        """Most media of one conversation, those of the prompt included; ``None`` for any number."""

    @property
    def max_context_tokens(self) -> int | None:
        """Most tokens that the model can take, prompt and response together; ``None`` for any number."""

    @property
    def remaining(self) -> int:
        """Tokens left of ``params.max_new_tokens``, which limits the whole rollout."""

    async def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        media: Sequence[Media] = (),
    ) -> Generation:
        """Generate the policy's continuation of tokens.

        A generation that is cut short, by the end of a step or an update of the weights, goes on by itself:
        its finish reason is never ``"abort"``. Where nothing is left of the budget or of the model's context,
        no token comes back, as ``"length"``.

        :param max_new_tokens: At most; never more than :attr:`remaining`. Calls that go on at the same time
            must name it, for each holds what it may need.
        :param stop: Strings that end it, beside those of :attr:`params`.
        :param media: Shown among the tokens, in order.
        :raises MediaError: They are more than :attr:`max_media`.
        """

    def draft(self, tokens: Sequence[int] | None = None, media: Sequence[Media] = ()) -> Draft:
        """Return the beginning of a sample.

        :param tokens: ``None`` takes the prompt's, with its media.
        :param media: Shown among ``tokens``.
        """

    def spend(self, tokens: Sequence[int], media: Sequence[Media] = (), *, shown: int = 0) -> bool:
        """Take tokens that the policy did not sample off the budget, if it has as many; return whether.

        :meth:`Draft.observe` does so.

        :param media: Shown among them.
        :param shown: Media of the conversation before these.
        :raises MediaError: They are more than :attr:`max_media`.
        :raises RolloutError: A token holds the place of a medium, and none is there.
        """

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without any that the tokenizer adds around it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation, rendered by the chat template with a generation prompt."""

    def next_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens after an answer: its end, further messages, and the generation prompt.

        :param messages: Messages of a tool or the user. Earlier ones are not rendered again, so their tokens
            stay as they were.
        """

    async def look(
        self, messages: Sequence[Mapping[str, Any]], *, chat: bool = True
    ) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """Return the tokens and media of further messages with media, as :meth:`next_turn`.

        The content of a message is a text, or a list of parts: ``{"type": "text", "text": ...}`` and
        ``{"type": "image", "image": ...}``, where an image is a path, bytes, a ``data:`` address, an address
        if ``media.allow_urls`` is set, or a ``PIL.Image``. What was shown is kept until the prompt's samples
        are done.

        :param chat: Whether the chat template puts them in words; else their texts follow one another, with
            the template's mark for each medium.
        :returns: Tokens, and media whose spans count from the first of them: what :meth:`Draft.observe`
            takes.
        :raises MediaError: A medium cannot be used, or these alone are more than :attr:`max_media`.
        """
