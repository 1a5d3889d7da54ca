"""Chat template: from a row's prompt field to messages, and from these to text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anygauge.config.schema import Data
from anygauge.data.time_limit import OverrunError, TimeLimit
from anygauge_hooks.errors import ConfigError

__all__ = [
    "Message",
    "TemplateRefusal",
    "apply_template",
    "as_messages",
    "kind",
    "prompt_problem",
    "render",
    "require_template",
    "takes_parts",
]

Message = Mapping[str, Any]
LIMIT_S = 60.0
"""For one conversation. A template takes milliseconds, but it is a program of whoever made the model."""


def prompt_problem(value: Any, *, apply_chat_template: bool, parts: bool = False) -> str | None:
    """Return the problem of a row's prompt field, as a clause, or ``None``.

    :param value: A string, or a list of chat messages.
    :param apply_chat_template: Whether messages can be rendered.
    :param parts: Whether the content of a message may be a list of parts, of which some are media.
    """
    if isinstance(value, str):
        return None if value.strip() else "is empty"
    if not isinstance(value, list):
        return f"is {kind(value)}, not a string or a list of messages"
    if not apply_chat_template:
        return "is a list of messages; set data.apply_chat_template = true to render it"
    if not value:
        return "is an empty list"
    problems = (
        f"message {position}: {problem}"
        for position, message in enumerate(value)
        for problem in _message_problems(message, parts)
    )
    return next(problems, None)


def _message_problems(message: Any, parts: bool) -> Iterator[str]:
    if not isinstance(message, dict):
        yield f"is {kind(message)}, not an object"
        return
    # A message that calls tools need not say anything.
    silent = isinstance(message.get("tool_calls"), list) and message["tool_calls"]
    for key in ("role", "content"):
        if key == "content" and silent and message.get(key) is None:
            continue
        if key not in message:
            yield f"has no {key!r}"
        elif not isinstance(message[key], str) and not (
            parts and key == "content" and isinstance(message[key], list)
        ):
            yield f"{key!r} is {kind(message[key])}, not a string"
    if not message.get("role"):
        yield "'role' is empty"


class TemplateRefusal(Exception):
    """A chat template raised an error of its own."""


def as_messages(value: str | Sequence[Message], system_prompt: str | None) -> list[Message]:
    """Return the messages of a prompt field; a string is one from the user, after the system prompt."""
    if not isinstance(value, str):
        return list(value)
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": value}]


def require_template(tokenizer: Any) -> None:
    """Check that chats can be rendered.

    :param tokenizer: A Hugging Face tokenizer.
    :raises ConfigError: It has no chat template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "data.apply_chat_template is true, but the tokenizer has no chat template.",
            hint="Add chat_template.jinja to the model directory, or set data.apply_chat_template = false.",
        )


def takes_parts(tokenizer: Any, config: Data, part: Message, mark: str) -> bool:
    """Return whether a chat template supports content parts.

    :param tokenizer: A Hugging Face tokenizer with a chat template.
    """
    content = [part, {"type": "text", "text": "a"}]
    try:
        return mark in render([{"role": "user", "content": content}], tokenizer, config, generate=True)
    except TemplateRefusal:
        return False


def render(
    messages: Sequence[Message],
    tokenizer: Any,
    config: Data,
    *,
    tools: Sequence[Any] | None = None,
    generate: bool,
) -> str:
    """Return messages as text.

    :param tokenizer: A Hugging Face tokenizer with a chat template.
    :param tools: JSON schemas of functions, for the template.
    :param generate: Whether an assistant turn is to follow; its opening is added.
    :raises ConfigError: The template runs too long.
    :raises TemplateRefusal: It raised; its error is the cause.
    """
    return apply_template(tokenizer, messages, tools, generate=generate, options=config.chat_template_kwargs)


def apply_template(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    *,
    generate: bool,
    options: Mapping[str, Any],
) -> str:
    """Return messages as text, with further arguments of the template; see :func:`render`."""
    try:
        with TimeLimit(LIMIT_S):
            text: str = tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                **options,
            )
    except OverrunError as error:
        raise ConfigError(
            f"The chat template has not rendered {len(messages)} messages in {LIMIT_S:g} s.",
            hint="Look for a loop in the model directory's chat_template.jinja.",
        ) from error
    except Exception as error:  # foreign code: a chat template
        raise TemplateRefusal(str(error)) from error
    return text


def kind(value: Any) -> str:
    """Return the type of a JSON value in words."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
