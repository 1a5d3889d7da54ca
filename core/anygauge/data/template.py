"""From the prompt field of a row to text and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anygauge.config.schema import Data
from anygauge_hooks.errors import ConfigError

__all__ = ["prompt_problem", "render", "tokenize"]

Messages = Sequence[Mapping[str, Any]]


def prompt_problem(value: Any, *, apply_chat_template: bool) -> str | None:
    """Return what is wrong with the prompt field of a row, as a clause, or ``None``.

    :param value: A string, or a list of chat messages.
    :param apply_chat_template: Whether messages can be rendered.
    """
    if isinstance(value, str):
        return None if value.strip() else "is empty"
    if not isinstance(value, list):
        return f"is {_kind(value)}, not a string or a list of messages"
    if not apply_chat_template:
        return "is a list of messages; set data.apply_chat_template = true to render it"
    if not value:
        return "is an empty list"
    problems = (
        f"message {position}: {problem}"
        for position, message in enumerate(value)
        if (problem := _message_problem(message))
    )
    return next(problems, None)


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"is {_kind(message)}, not an object"
    for key in ("role", "content"):
        if key not in message:
            return f"has no {key!r}"
        if not isinstance(message[key], str):
            return f"{key!r} is {_kind(message[key])}, not a string"
    return None if message["role"] else "'role' is empty"


def render(value: str | Messages, tokenizer: Any, config: Data) -> str:
    """Return the text that the policy sees.

    :param value: A prompt without a :func:`prompt_problem`.
    :param tokenizer: A Hugging Face tokenizer.
    :raises ConfigError: The tokenizer has no chat template.
    """
    if not config.apply_chat_template:
        assert isinstance(value, str)
        return value
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "data.apply_chat_template is true, but the tokenizer has no chat template.",
            hint="Add chat_template.jinja to the model directory, or set data.apply_chat_template = false.",
        )
    text: str = tokenizer.apply_chat_template(
        _messages(value, config.system_prompt),
        tokenize=False,
        add_generation_prompt=True,
        **config.chat_template_kwargs,
    )
    return text


def tokenize(texts: Sequence[str], tokenizer: Any, config: Data) -> list[list[int]]:
    """Return the token ids of rendered prompts, in one call of the tokenizer.

    Its own special tokens are added to plain prompts; a chat template writes them itself.
    """
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=not config.apply_chat_template)[
        "input_ids"
    ]
    return ids


def _messages(value: str | Messages, system_prompt: str | None) -> list[Mapping[str, Any]]:
    if not isinstance(value, str):
        return list(value)
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": value}]


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
