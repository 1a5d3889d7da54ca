"""Chat requests, parsed the same for every API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from anygauge.rollout.gateway.images import SLOT, image_in
from anygauge.rollout.gateway.messages import Chat
from anygauge.rollout.gateway.refusals import bad_request

__all__ = ["ChatRequest", "check_sampling", "content_of", "field", "number", "stop_strings", "text_of"]

_MOST_STOPS, _LONGEST_STOP = 64, 1000
"""Stop strings, and characters of one. Engines look for each after every token; OpenAI takes four."""


class ChatRequest(NamedTuple):
    """A request for answers."""

    model: str
    chat: Chat
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    answers: int = 1
    calls: Literal["none", "one", "many"] = "many"
    """How many calls of tools an answer may hold; with ``none`` they stay text."""
    sampling: Mapping[str, Any] = {}
    """Settings that change how tokens are drawn, as far as the request has them."""
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the usage."""
    log_probs: bool = False
    reasoning: bool = True
    """Whether the agent is told the reasoning."""

    def characters(self) -> int:
        """Return the number of characters of the chat."""
        return self.chat.characters()


def check_sampling(chat_request: ChatRequest, run: Mapping[str, Any]) -> None:
    """Check that a request samples as the run does.

    :param run: The run's settings; what is not among them is off.
    :raises Refusal: It does not.
    """
    for name, value in chat_request.sampling.items():
        wanted = run.get(name, 0)
        if value is not None and value != wanted and not (value in ({}, []) and not wanted):
            raise bad_request(
                f"{name} = {json.dumps(value)}, but this run samples with {json.dumps(wanted)}; its tokens "
                "could not be trained on. Leave it out, or let the run override it: sampling = 'run'.",
                name,
            )


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Return a field of a request; null is the default.

    :raises Refusal: It is of another kind.
    """
    value = body.get(name)
    if value is None:
        return default
    # JSON's true is no number, though Python's is.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise bad_request(f"{name} is {_shown(value)}, which is not of the right type.", name)
    return value


def number(
    body: Mapping[str, Any], name: str, least: int, default: int | None = None, *, most: int = 2**63 - 1
) -> int | None:
    """Return an integer.

    :raises Refusal: It is none, too small or too large.
    """
    value: int | None = field(body, name, int, default)
    if value is not None and not least <= value <= most:
        raise bad_request(f"{name} is {value}; it must be from {least} to {most}.", name)
    return value


def stop_strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple without empty ones.

    :raises Refusal: It is something else, or too much to look for after each token.
    """
    value = field(body, name, (str, list), ())
    values = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(each, str) for each in values):
        raise bad_request(f"{name} is {_shown(value)}, not a string or a list of strings.", name)
    if len(values) > _MOST_STOPS or any(len(each) > _LONGEST_STOP for each in values):
        raise bad_request(
            f"{name} has {len(values)} strings of up to {max(map(len, values))} characters; at most "
            f"{_MOST_STOPS} of {_LONGEST_STOP} are taken.",
            name,
        )
    return tuple(each for each in values if each)


def content_of(content: Any, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of a message's content, with a slot for each image in it, and the images.

    :raises Refusal: There is something else in it.
    """
    if not isinstance(content, list):
        return text_of(content, where), ()
    pieces: list[str] = []
    images: list[str] = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if (image := image_in(block, place)) is not None:
            images.append(image)
            pieces.append(SLOT)
            continue
        between = "\n" if pieces and pieces[-1] is not SLOT else ""
        pieces.append(between + _block_text(block, place))
    return "".join(pieces), tuple(images)


def text_of(content: Any, where: str, *, between: str = "\n") -> str:
    """Return the text of a message's content: a string, or a list of text blocks.

    :param between: Separator of the blocks.
    :raises Refusal: There is something else in it.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} is {_shown(content)}, not a string or a list of blocks.", where)
    return between.join(_block_text(block, f"{where}[{number}]") for number, block in enumerate(content))


def _block_text(block: Any, where: str) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type") if isinstance(block, Mapping) else None
    text = block.get("text", block.get("refusal")) if isinstance(block, Mapping) else None
    if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
        raise bad_request(
            f"{where} is {_shown(kind or block)}; only text and images can be given to a model.", where
        )
    return text


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:80] + "..."
