"""Conversion between tokens and text, for rollout functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from anygauge.config.schema import Data
from anygauge.data.template import render, require_template
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Prompt
from anygauge_hooks.rollout import Generation

__all__ = ["Show", "TextTools"]

Rendered = Callable[[Sequence[Mapping[str, Any]]], tuple[int, ...]]
"""Function from messages without media, with marked placeholders, to their tokens."""
Show = Callable[[Sequence[Mapping[str, Any]], Prompt, Rendered], tuple[tuple[int, ...], tuple[Media, ...]]]
"""From messages with media, the prompt that they belong to and how messages become tokens, to the tokens
and the media among them."""

_SHORT, _TEXTS = 16, 4096
"""Most tokens of a text that is kept once it was decoded, and how many are."""
_EARLIER = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})
"""Stands for what was said before, in front of which a template may put more than in front of nothing."""


class TextTools:
    """A tokenizer and a chat template.

    :param tokenizer: A Hugging Face tokenizer.
    :param data: The table of the config, for the arguments of the template.
    :param context: Most tokens that the model can take; ``None`` for any number.
    :param show: Takes the media of messages into the run's store; ``None`` in a run of text.
    :param max_media: Most media of one conversation; ``None`` for any number.
    """

    def __init__(
        self,
        tokenizer: Any,
        data: Data,
        context: int | None = None,
        show: Show | None = None,
        max_media: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.context = context
        self.max_media = max_media
        self._data = data
        self._show = show
        self._decode_short = lru_cache(maxsize=_TEXTS)(self._decode)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without any around it."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens.

        :param special: Whether special tokens are part of it.
        """
        if len(tokens) <= _SHORT:  # short answers repeat a lot, and a dictionary is cheaper than a tokenizer
            return self._decode_short(tuple(tokens), special=special)
        return self._decode(tokens, special=special)

    def _decode(self, tokens: Sequence[int], *, special: bool) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation that is to be answered.

        :raises ConfigError: The tokenizer has no chat template.
        """
        require_template(self.tokenizer)
        return self.encode(render(messages, self.tokenizer, self._data, tools=tools, generate=True))

    def next_turn(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return what follows an answer that ended with the end-of-sequence token.

        :raises ConfigError: The tokenizer has no chat template.
        :raises RolloutError: The template renders earlier turns otherwise when more follow.
        """
        require_template(self.tokenizer)
        before = render(_EARLIER, self.tokenizer, self._data, generate=False)
        after = render([*_EARLIER, *messages], self.tokenizer, self._data, generate=True)
        if not after.startswith(before):
            raise RolloutError(
                "The chat template changes an answer once further messages follow it.",
                hint="Write the tokens between the turns yourself: draft.observe(rollout.encode(...)).",
            )
        end = self.tokenizer.eos_token or ""
        closing = before.rpartition(end)[2] if end and end in before else ""
        return self.encode(closing + after.removeprefix(before))

    def look(
        self, messages: Sequence[Mapping[str, Any]], prompt: Prompt, *, chat: bool
    ) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """Return what follows an answer where messages show media; see :meth:`Rollout.look`.

        :param prompt: As long as it lives, so do the media.
        :raises RolloutError: The run has no media.
        """
        if self._show is None:
            raise RolloutError(
                "A rollout shows media, and this run's model takes none.",
                hint='Set model.modalities = ["image"].',
            )
        return self._show(messages, prompt, self.next_turn if chat else self._plain)

    def _plain(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self.encode("".join(message["content"] for message in messages))

    def cut_at_stop(self, said: Generation, joint: int, stop: Sequence[str]) -> Generation:
        """Cut a generation of several parts where a stop string ends that lies across a joint.

        An engine that is given the first part as a prompt looks for the strings in the second alone.

        :param joint: Tokens of the parts before the last.
        :returns: The generation itself if there is none.
        """
        longest = max((len(text.encode()) for text in stop), default=0)
        for length in range(joint + 1, min(len(said.tokens), joint + longest) + 1):
            window = self.decode(said.tokens[max(0, length - longest - 4) : length], special=True)
            if any(text in window for text in stop):
                return said.cut(length, "stop")
        return said
