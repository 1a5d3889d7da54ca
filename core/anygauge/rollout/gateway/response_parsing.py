"""Split a model's output into reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from anygauge.rollout.gateway.tool_formats import Called, ToolFormat

__all__ = ["THINK", "Block", "Style", "read"]

THINK = ("<think>", "</think>")
"""Around reasoning, in every family that is known here."""


class Block(NamedTuple):
    """A part of an answer."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: Called | None = None


class Style(NamedTuple):
    """How an answer is read."""

    think: bool
    """Whether reasoning is told apart."""
    opened: bool = False
    """Whether the prompt has opened the reasoning already."""
    tools: ToolFormat | None = None
    """``None`` leaves calls in the text."""
    schemas: Mapping[str, Any] = {}
    """Parameters of each tool, as JSON schema."""
    stop: tuple[str, ...] = ()
    """Strings from which on nothing is shown."""


def read(text: str, style: Style) -> list[Block]:
    """Return the parts of an answer.

    :param text: Without the token that ended the turn.
    """
    stops = [at for each in style.stop if (at := text.find(each)) >= 0]
    text = text[: min(stops, default=None)]
    begin = _reasoning_begin(text, style)
    if begin is None:
        return _content(text, style, trimmed=False)
    reasoning, closed, content = text[begin:].partition(THINK[1])
    blocks = [Block("reasoning", reasoning.strip())] if reasoning.strip() else []
    return blocks + _content(content, style, trimmed=True) if closed else blocks


def _reasoning_begin(text: str, style: Style) -> int | None:
    """Return where the reasoning begins; ``None`` without any."""
    if not style.think:
        return None
    blank = len(text) - len(text.lstrip())
    if text.startswith(THINK[0], blank):
        return blank + len(THINK[0])
    return 0 if style.opened else None


def _content(text: str, style: Style, *, trimmed: bool) -> list[Block]:
    """Return the parts of what follows the reasoning.

    :param trimmed: Whether white space at the beginning separates it from what was before.
    """
    if style.tools is None:
        text = text.lstrip() if trimmed else text
        return [Block("text", text)] if text else []
    blocks: list[Block] = []
    begin = at = 0
    while (at := text.find(style.tools.start, at)) >= 0:
        end = text.find(style.tools.end, at + len(style.tools.start))
        if end < 0:
            break
        calls = style.tools.read(text[at + len(style.tools.start) : end], style.schemas)
        after = end + len(style.tools.end)
        if calls is not None:
            blocks += _text(text[begin:at].rstrip(), trimmed or bool(blocks))
            blocks += [Block("call", call=call) for call in calls]
            begin = after
        at = after
    return blocks + _text(text[begin:], trimmed or bool(blocks))


def _text(text: str, trimmed: bool) -> list[Block]:
    text = text.lstrip() if trimmed else text
    return [Block("text", text)] if text.strip() else []
