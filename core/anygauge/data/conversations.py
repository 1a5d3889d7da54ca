"""Loss masks of chats for SFT: find the assistant's turns in the output of any chat template.

A template may mark the turns with ``{% generation %}``. Otherwise the chat is rendered again with another
content of a turn. The text that stays the same, before and after, is not part of the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anygauge.config.schema import Data
from anygauge.data.problems import BadRowError
from anygauge.data.template import Message, TemplateRefusal, render

__all__ = ["TurnFinder"]

Span = tuple[int, int]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begins a turn of the assistant in a template of transformers."""
CONTENTS = ("0", "1")
"""Contents that differ in every character."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with what a model thinks before it answers."""
_NO_TURN = "SFT needs a message with the role 'assistant' in each row, or the answer in data.label_key."


class TurnFinder:
    """Finds the assistant's turns in rendered chats.

    :param tokenizer: A Hugging Face tokenizer with a chat template.
    :param stop_tokens: Texts of the tokens that end a response; the first is written after a last turn that
        the template does not close.
    """

    def __init__(self, tokenizer: Any, config: Data, stop_tokens: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._stops = stop_tokens
        special = getattr(tokenizer, "all_special_tokens", ())
        self._stop = _any_of(stop_tokens)
        self._closing = _any_of([*stop_tokens, *special])
        """Tokens that may end a turn: a base model has other stop tokens than its chat template writes."""

    def split(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[str]:
        """Render a chat, and split it into pieces, alternately untrained and trained.

        A turn that the template shortens is not trained on: the policy would have written all of it. Qwen3's
        leaves out the thinking of all turns before the last question.

        :raises BadRowError: No turn can be trained on, or the turns cannot be told apart.
        :raises TemplateRefusal: The template refuses the chat.
        """
        chat = _Chat(self, messages, tools)
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise BadRowError("has no turn of the assistant to train on", hint=_NO_TURN)
        self._check_stops(messages)
        spans = [span for span in self._spans(chat, answers) if span is not None]
        if len(spans) != len(answers):
            raise BadRowError(
                f"has {len(answers)} turns of the assistant; {len(spans)} can be found in what the template "
                "makes of it",
                hint="The turns of a conversation must alternate as the chat template expects.",
            )
        pieces, position = [], 0
        for at, (begin, end) in zip(answers, spans, strict=True):
            if _is_whole(messages[at], chat.text[begin:end]):
                pieces += [chat.text[position:begin], chat.text[begin:end]]
                position = end
        if not pieces:
            raise BadRowError("has no turn of the assistant that the chat template leaves whole")
        is_last = (answers[-1], spans[-1][1]) == (len(messages) - 1, position)
        if is_last and not self._closing.search(pieces[-1]):
            return [*pieces[:-1], pieces[-1] + "".join(self._stops[:1])]
        return [*pieces, *([chat.text[position:]] if position < len(chat.text) else [])]

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, generate: bool) -> str:
        """Render messages; see :func:`anygauge.data.template.render`."""
        return render(messages, self._tokenizer, self._config, tools=tools, generate=generate)

    def _spans(self, chat: _Chat, answers: Sequence[int]) -> Iterator[Span | None]:
        template = self._tokenizer.get_chat_template(tools=chat.tools)
        if GENERATION.search(template):
            marked = list(self._marked(chat, template))
            if len(marked) == len(answers):
                marked = [self._closed(chat, at, *span) for at, span in zip(answers, marked, strict=True)]
            yield from marked
            return
        end = 0
        for at in answers:
            span = self._differing(chat, at, end)
            yield span
            end = end if span is None else span[1]

    def _closed(self, chat: _Chat, at: int, begin: int, end: int) -> Span:
        """Return a marked turn without what a policy is given, up to the token that ends it."""
        prompt = chat.prompt(at)
        if prompt is not None and begin < len(prompt) <= end and chat.text.startswith(prompt):
            begin = len(prompt)
        closings = [each.end() for each in self._closing.finditer(chat.text, begin, end)]
        if closings and not chat.text[closings[-1] : end].strip():
            return begin, closings[-1]
        after = self._follows(chat.text, end)
        return begin, end if after is None else after

    def _follows(self, text: str, end: int) -> int | None:
        """Return the end of a closing token that follows a turn at once, or after white space."""
        closing = self._closing.search(text, end)
        return None if closing is None or text[end : closing.start()].strip() else closing.end()

    def _marked(self, chat: _Chat, template: str) -> Iterator[Span]:
        """Yield the turns that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self._tokenizer.special_tokens_map, **self._config.chat_template_kwargs}
        tools = list(chat.tools) if chat.tools else None
        try:
            (text,), (spans,) = render_jinja_template(
                conversations=[list(chat.messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **options,
            )
        except Exception as error:  # foreign code: a chat template
            raise TemplateRefusal(str(error)) from error
        if text == chat.text:  # else nothing is known of the text that is trained on
            yield from spans

    def _differing(self, chat: _Chat, at: int, earlier: int) -> Span | None:
        """Return the turn of a message; ``None`` if the text does not depend on its content.

        :param earlier: End of the turn before it.
        """
        found = chat.content(at)
        if found is None:
            return None
        begin, content_end = found
        prompt = chat.prompt(at)
        if prompt is not None and len(prompt) >= earlier and chat.text.startswith(prompt):
            begin = len(prompt)  # thinking, and markers of it, are the policy's to write
        if (end := self._follows(chat.text, content_end)) is not None:
            return begin, end
        after = chat.content(at + 1) if at + 1 < len(chat.messages) else None
        limit = len(chat.text) if after is None else after[0]
        for tokens in (self._stop, self._closing):
            if closing := tokens.search(chat.text, content_end, limit):
                return begin, closing.end()
        return begin, content_end

    def _check_stops(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            for text in _strings(message):
                if stop := self._stop.search(text):
                    raise BadRowError(
                        f"message {number}: holds {stop.group()!r}, with which a turn of the assistant ends"
                    )


class _Chat:
    """A rendered chat, and what changes in it with the content of a message."""

    def __init__(self, finder: TurnFinder, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        self._finder = finder
        self.messages = messages
        self.tools = tools
        self.text = finder.render(messages, tools, generate=False)

    def prompt(self, at: int) -> str | None:
        """Return what a policy would be given to write a message; ``None`` if the template refuses that."""
        try:
            return self._finder.render(self.messages[:at], self.tools, generate=True)
        except TemplateRefusal:
            return None

    def content(self, at: int) -> Span | None:
        """Return where the content of a message begins and ends, calls of tools included."""
        one, other = (self._with(at, content) for content in CONTENTS)
        if one == other:
            return None
        begin = _common(one, other, self.text)
        after = _common(one[::-1], other[::-1], self.text[::-1])
        return begin, max(begin, len(self.text) - after)

    def _with(self, at: int, content: str) -> str:
        changed = {**self.messages[at], **_replaced(self.messages[at], content)}
        messages = [*self.messages[:at], changed, *self.messages[at + 1 :]]
        return self._finder.render(messages, self.tools, generate=False)


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of any of these texts, longer ones first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _common(*texts: str) -> int:
    """Return the length of the common prefix of texts."""
    # os.path.commonprefix compares one character after the other, of which a long chat has a million.
    least, most = 0, min(map(len, texts))
    while least < most:
        middle = (least + most + 1) // 2
        same = all(text[least:middle] == texts[0][least:middle] for text in texts[1:])
        least, most = (middle, most) if same else (least, middle - 1)
    return least


def _replaced(message: Message, content: str) -> dict[str, Any]:
    """Return the fields of a message by which it says something, with another content."""
    is_parts = isinstance(message.get("content"), list)
    fields: dict[str, Any] = {"content": [{"type": "text", "text": content}] if is_parts else content}
    fields |= {name: content for name in THOUGHTS if isinstance(message.get(name), str)}
    if isinstance(calls := message.get("tool_calls"), list):
        fields["tool_calls"] = [_other_call(call, content) for call in calls]
    return fields


def _other_call(call: Any, content: str) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments: Any = {content: content}
    if isinstance(function.get("arguments"), str):
        arguments = json.dumps(arguments)
    changed = {**function, "arguments": arguments}  # templates write the name into the tool's answer too
    return {**call, "function": changed} if "function" in call else changed


def _is_whole(message: Message, turn: str) -> bool:
    """Return whether a rendered turn has the whole content of a message, except white space."""
    content = message.get("content")
    parts = (
        [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    )
    thoughts = (message.get(name) for name in THOUGHTS)
    said = [*thoughts, content, *parts, *_called(message.get("tool_calls"))]
    squeezed = "".join(turn.split())
    return all("".join(text.split()) in squeezed for text in said if isinstance(text, str))


def _called(calls: Any) -> Iterator[Any]:
    """Yield the names of the functions that a message calls."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield function.get("name")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
