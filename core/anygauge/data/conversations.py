"""Trained parts of a rendered chat, for SFT: the assistant's turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import Data
from anygauge.data.problems import BadRowError
from anygauge.data.template import Message, TemplateRefusal, render
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.models import AssistantTurns

__all__ = ["TurnFinder", "make_turn_finder"]


@dataclass(frozen=True, slots=True)
class TurnFinder:
    """Finds the assistant's turns in rendered chats."""

    turns: AssistantTurns
    opening: str
    """Text of the generation prompt after ``turns.start``. In a turn that begins with it, training starts
    after it."""

    def split(self, messages: Sequence[Message], text: str) -> list[str]:
        """Split a rendered chat into pieces, alternately untrained and trained.

        A turn that the template shortens is not: the policy would have written all of it. Qwen3's leaves out
        the thinking of all turns before the last question.

        :param text: The messages, rendered.
        :raises BadRowError: No turn can be trained on, or the turns cannot be told apart.
        """
        self._check_markers(messages)
        answers = [message for message in messages if message["role"] == "assistant"]
        if not answers:
            raise BadRowError("has no turn of the assistant to train on", hint=_NO_TURN)
        spans = list(self._spans(text))
        if len(spans) != len(answers):
            raise BadRowError(
                f"has {len(answers)} turns of the assistant; {len(spans)} can be found in what the template "
                "makes of it",
                hint="The turns of a conversation must alternate as the chat template expects.",
            )
        pieces, position = [], 0
        for message, (begin, end) in zip(answers, spans, strict=True):
            if _is_whole(message, text[begin:end]):
                given = text.startswith(self.opening, begin, end)
                trained = begin + len(self.opening) * given
                pieces += [text[position:trained], text[trained:end]]
                position = end
        if not pieces:
            raise BadRowError("has no turn of the assistant that the chat template leaves whole")
        return [*pieces, *([text[position:]] if position < len(text) else [])]

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where the content of each turn begins and its closing marker ends."""
        start = text.find(self.turns.start)
        while start >= 0:
            begin = start + len(self.turns.start)
            end = text.find(self.turns.end, begin)
            if end < 0:
                return
            yield begin, end + len(self.turns.end)
            start = text.find(self.turns.start, end)

    def _check_markers(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            for text in _strings(message):
                for marker in (self.turns.start, self.turns.end):
                    if marker in text:
                        raise BadRowError(
                            f"message {number}: holds {marker!r}, with which the chat template marks turns"
                        )


_NO_TURN = "SFT needs a message with the role 'assistant' in each row, or the answer in data.label_key."


def make_turn_finder(turns: AssistantTurns, tokenizer: Any, config: Data) -> TurnFinder:
    """Return a finder of the assistant's turns in the output of a chat template.

    :param turns: How the family marks them; two empty strings if it has no chats.
    :raises ConfigError: The family has no chats, or the template marks turns otherwise.
    """
    if not (turns.start and turns.end):
        raise ConfigError(
            "SFT on chats needs to know how the model marks the assistant's turns; its family does not say.",
            hint="Add assistant_turns to its ModelSpec, or train on plain prompts and labels: "
            "data.apply_chat_template = false.",
        )
    try:
        text = render([{"role": "user", "content": "a"}], tokenizer, config, generate=True)
    except TemplateRefusal:  # it may take the conversations of the rows
        return TurnFinder(turns, "")
    _, start, opening = text.rpartition(turns.start)
    if not start:
        raise ConfigError(
            f"The chat template does not begin the assistant's turn with {turns.start!r}, as the model's "
            f"family does; it makes {text!r} of a user's 'a'.",
            hint="Use the family's own chat template for SFT.",
        )
    return TurnFinder(turns, opening)


def _is_whole(message: Message, turn: str) -> bool:
    """Return whether a rendered turn has the whole content of a message, except white space."""
    said = [message.get("reasoning_content"), message.get("content"), *_called(message.get("tool_calls"))]
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
