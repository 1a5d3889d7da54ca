"""Positions of media in a prompt: ``<image>`` in text, or content parts of messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anygauge.data.problems import BadMediaError
from anygauge.wording import counted
from anygauge_hooks.media import MediaKind

__all__ = ["Placed", "find_placeholders"]

_ANY = re.compile("<(image|video|audio)>")
_HINT = "Write one <image>, <video> or <audio> for each of the row's media, or one content part."


@dataclass(slots=True)
class Placed:
    """A prompt with its media taken out."""

    values: list[tuple[MediaKind, Any]] = field(default_factory=list)
    """Values of the row's media, in the order of their positions in the prompt."""
    prompt: Any = None
    """Text, or messages, whose contents are text or lists of parts ``{"type": "text", "text": …}`` and
    ``{"type": "image"}``."""


def find_placeholders(
    prompt: str | Sequence[Mapping[str, Any]],
    given: Mapping[MediaKind, Sequence[Any]],
    marks: Mapping[MediaKind, str],
    *,
    parts: bool,
) -> Placed:
    """Take the media of a prompt out of its text and of the row's fields.

    :param given: The row's media by kind, in order.
    :param marks: The chat template's text for one medium, written where there are to be no parts.
    :param parts: Whether the contents of messages become parts.
    :raises BadMediaError: There are more or fewer placeholders than media.
    """
    walk = _Walk(given, marks, parts)
    if isinstance(prompt, str):
        walk.placed.prompt = walk.text(prompt)
    else:
        walk.placed.prompt = [walk.message(message) for message in prompt]
    walk.finish()
    return walk.placed


class _Walk:
    def __init__(
        self, given: Mapping[MediaKind, Sequence[Any]], marks: Mapping[MediaKind, str], parts: bool
    ) -> None:
        self._given = given
        self._marks = marks
        self._parts = parts
        self._left = {kind: iter(values) for kind, values in given.items()}
        self._asked = dict.fromkeys(given, 0)
        self.placed = Placed()

    def text(self, text: str) -> str:
        """Return a text with the model's marks in the place of placeholders."""
        return "".join(
            part["text"] if part["type"] == "text" else self._marks[part["type"]]
            for part in self._split(text)
        )

    def message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message without its media content."""
        content = message.get("content")
        before = len(self.placed.values)
        if isinstance(content, str):
            parts = list(self._split(content))
        elif isinstance(content, list):
            parts = [own for part in content for own in self._part(part)]
        else:
            return message
        if self._parts and (isinstance(content, list) or len(self.placed.values) > before):
            return {**message, "content": parts}
        texts = (part["text"] if part["type"] == "text" else self._marks[part["type"]] for part in parts)
        return {**message, "content": "".join(texts)}

    def _part(self, part: Any) -> Iterator[dict[str, Any]]:
        if isinstance(part, str):
            yield from self._split(part)
            return
        if not isinstance(part, Mapping) or "type" not in part:
            raise BadMediaError("has a content part that is not an object with 'type'")
        kind = str(part["type"]).removesuffix("_url")
        if kind == "text":
            yield from self._split(str(part.get("text", "")))
        elif kind in self._marks:
            own = {key: value for key, value in part.items() if key != "type" and value is not None}
            self._take(kind, own)  # type: ignore[arg-type]  # it is a kind, since it has a mark
            yield {"type": kind}
        else:
            raise BadMediaError(f"has a content part of type {part['type']!r}, which the run does not take")

    def _split(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the parts of a text; kinds that no field holds are text."""
        position = 0
        for match in _ANY.finditer(text):
            kind: Any = match[1]
            if kind in self._given:
                if match.start() > position:
                    yield {"type": "text", "text": text[position : match.start()]}
                self._take(kind, {})
                yield {"type": kind}
                position = match.end()
        if position < len(text) or not text:
            yield {"type": "text", "text": text[position:]}

    def _take(self, kind: MediaKind, own: Mapping[str, Any]) -> None:
        if own:
            self.placed.values.append((kind, own))
            return
        self._asked[kind] = self._asked.get(kind, 0) + 1
        value = next(self._left.get(kind, iter(())), None)
        if value is not None:
            self.placed.values.append((kind, value))

    def finish(self) -> None:
        """Compare the numbers of placeholders and of media."""
        for kind, marks in self._asked.items():
            count = len(self._given.get(kind, ()))
            if marks != count:
                media = counted(count, "recording" if kind == "audio" else kind)
                raise BadMediaError(f"has {counted(marks, 'placeholder')} <{kind}> and {media}", hint=_HINT)
