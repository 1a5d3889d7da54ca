"""Chat rendering: messages to text and tokens, with the tokenizer's own template."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anygauge.data.template import TemplateRefusal, apply_template
from anygauge.rollout.gateway.messages import Chat, Message
from anygauge.rollout.gateway.refusals import Refusal, bad_request
from anygauge.rollout.gateway.response_parsing import THINK
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.rl import FinishReason

__all__ = ["Renderer"]

_MARK = f"mark{secrets.token_hex(16)}"
"""Stands for what the assistant said. No agent can guess it, and no template alters it."""


class Renderer:
    """Writes chats as a model reads them.

    :param tokenizer: A Hugging Face tokenizer with a chat template.
    :param options: Further arguments of the template, beside those of a request.
    :param stop_token_ids: Tokens that end a turn, beside the tokenizer's end-of-sequence token.
    :param spoken: Special tokens that are part of what is said, such as those around calls.
    :raises ConfigError: The tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        options: Mapping[str, Any] | None = None,
        stop_token_ids: Iterable[int] = (),
        spoken: Iterable[str] = (),
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "The gateway renders chats, but the tokenizer has no chat template.",
                hint="Add chat_template.jinja to the model directory.",
            )
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._stops = {*stop_token_ids, tokenizer.eos_token_id}
        self._special = _special_ids(tokenizer) - set(tokenizer.convert_tokens_to_ids(list(spoken)))
        self._reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)

    def render(self, chat: Chat, *, generate: bool) -> str:
        """Return a chat as text.

        :param generate: Whether an assistant's turn is to follow; its opening is added.
        :raises Refusal: The template does not take such a chat.
        """
        taken = self._reserved.intersection(chat.options)
        if taken:
            raise bad_request(f"chat_template_kwargs cannot set {sorted(taken)}.", "chat_template_kwargs")
        try:
            try:
                return self._applied(chat, generate, spelled=False)
            except TemplateRefusal as refusal:
                if not isinstance(refusal.__cause__, TypeError):
                    raise
                # DeepSeek's template joins the arguments of calls to text
                return self._applied(chat, generate, spelled=True)
        except (TemplateRefusal, ConfigError) as refusal:
            error = refusal.__cause__ if isinstance(refusal, TemplateRefusal) else refusal
            problem = f"The chat template does not take this conversation: {type(error).__name__}: {error}"
            raise bad_request(problem, "messages") from error

    def _applied(self, chat: Chat, generate: bool, *, spelled: bool) -> str:
        return apply_template(
            self._tokenizer,
            [message.for_template(spelled=spelled) for message in chat.messages],
            [dict(tool) for tool in chat.tools],
            generate=generate,
            options={**self._options, **chat.options},
        )

    def after(self, chat: Chat, position: int) -> str | None:
        """Return the template's text after the assistant's content of a message.

        That is the end of the turn, the messages that follow, and the opening of the next turn.

        :param position: Position of the assistant's message.
        :returns: ``None`` where the template does not tell.
        """
        whole = self._behind_mark(chat, position, len(chat.messages), generate=True)
        return self._by_difference(chat, position) if whole is None else whole

    def _behind_mark(self, chat: Chat, position: int, end: int, *, generate: bool) -> str | None:
        messages = (
            *chat.messages[:position],
            Message("assistant", _MARK),
            *chat.messages[position + 1 : end],
        )
        try:
            parts = self.render(chat._replace(messages=messages), generate=generate).split(_MARK)
        except Refusal:  # some templates want calls before a tool's answer
            return None
        return parts[1] if len(parts) == 2 else None

    def _by_difference(self, chat: Chat, position: int) -> str | None:
        """Return the same from what the chat has more than its beginning."""
        closing = self._behind_mark(chat, position, position + 1, generate=False)
        upto = self.render(chat._replace(messages=chat.messages[: position + 1]), generate=False)
        whole = self.render(chat, generate=True)
        if closing is None or not upto.endswith(closing) or not whole.startswith(upto):
            return None
        return closing + whole[len(upto) :]

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, in which the template has written the special ones."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_after(self, token: int, text: str) -> tuple[int, ...]:
        """Return the tokens of a text as they are behind a special token."""
        # Some tokenizers treat the beginning of a text as that of a word.
        whole = self.encode(self.decode((token,)) + text)
        return whole[1:] if whole[:1] == (token,) else self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones too."""
        if not tokens:
            return ""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def plain(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def spoken(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> Sequence[int]:
        """Return the tokens of a response without the one that ends the turn, if one does.

        Some models end a turn with the token that begins the next one, which no list of theirs names.

        :param finish_reason: ``None`` of a response that grows: what may be the last token is left out.
        """
        ends = tokens and (
            tokens[-1] in self._stops or (finish_reason in ("stop", None) and tokens[-1] in self._special)
        )
        return tokens[:-1] if ends else tokens

    def opens_thinking(self, prompt: str) -> bool:
        """Return whether a rendered prompt has opened the reasoning already."""
        return prompt.rstrip().endswith(THINK[0])


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the tokens that no text is made of."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, content in added.items() if getattr(content, "special", False)}
    return {*special, *tokenizer.all_special_ids}
