"""Chat messages, independent of the API, and their comparison."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from anygauge.strict_json import parse_json

__all__ = ["MESSAGE_CHARACTERS", "Call", "Chat", "Message", "same_reasoning", "say", "start"]

MESSAGE_CHARACTERS = 16
"""For which a message counts at least: each has a role and an end, whatever it says."""


class Call(NamedTuple):
    """A function that the assistant calls."""

    id: str
    name: str
    arguments: str
    """JSON, in any spelling; or else what was written instead."""

    def parsed(self) -> Any:
        """Return the arguments as a template takes them: an object, or the text where it is not JSON."""
        try:
            return parse_json(self.arguments)
        except ValueError:
            return self.arguments

    def spelled(self) -> str:
        """Return the arguments as JSON in one spelling, or the text where it is none."""
        value = self.parsed()
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Message(NamedTuple):
    """One message."""

    role: str
    content: str
    reasoning: str | None = None
    """Reasoning of the assistant; ``None`` where it is not sent, as by most agents."""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    """Id of the call that a tool's result answers."""
    name: str | None = None
    images: tuple[str, ...] = ()
    """``data:`` or addresses, in the order of their places in the content."""

    def for_template(self, *, spelled: bool = False) -> dict[str, Any]:
        """Return the message as chat templates read it.

        :param spelled: Whether arguments of calls are JSON text; most templates want the object.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.spelled() if spelled else call.parsed(),
                    },
                }
                for call in self.calls
            ]
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        if self.name is not None:
            message["name"] = self.name
        return message

    def characters(self) -> int:
        """Return the number of characters to render."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.calls)
        said = len(self.content) + len(self.reasoning or "") + len(self.name or "") + calls
        return max(said, MESSAGE_CHARACTERS)

    def meaning(self) -> str:
        """Return a key that is equal for messages with the same meaning.

        Ids of calls, the spelling of their arguments and white space around what the assistant says are not
        part of it; neither is its reasoning, see :func:`same_reasoning`.
        """
        content = self.content.strip() if self.role == "assistant" else self.content
        calls = [[call.name, _canonical(call)] for call in self.calls]
        images = [hashlib.blake2b(image.encode(), digest_size=16).hexdigest() for image in self.images]
        return json.dumps([self.role, content, self.name, calls, *images])


class Chat(NamedTuple):
    """Messages and tools that a request shows the model."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """As OpenAI's API has them, which is what chat templates take."""
    options: Mapping[str, Any] = {}
    """Further arguments of the chat template."""

    def characters(self) -> int:
        """Return the number of characters to render: messages, tools and options."""
        shown = json.dumps([self.tools, self.options], ensure_ascii=False)
        return len(shown) + sum(message.characters() for message in self.messages)


def same_reasoning(sent: str | None, recorded: str | None) -> bool:
    """Return whether an agent sent back the model's reasoning unchanged, or none."""
    return not sent or sent.strip() == (recorded or "").strip()


def start(chat: Chat) -> str:
    """Return the key of an empty chat."""
    return _digest("", [_sorted(tool) for tool in chat.tools] + [_sorted(chat.options)])


def say(key: str, message: Message, *, reasoning: str | None = None) -> str:
    """Return the key of a chat after a message.

    :param key: Key of the chat before it.
    :param reasoning: Tells the chat apart from one in which the assistant reasoned otherwise.
    """
    return _digest(key, [message.meaning(), reasoning or ""])


def _canonical(call: Call) -> str:
    value = call.parsed()
    return value.strip() if isinstance(value, str) else _sorted(value)


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(key: str, parts: Iterable[str]) -> str:
    return hashlib.blake2b(json.dumps([key, *parts]).encode(), digest_size=16).hexdigest()
