"""Split a model's output into reasoning, text and tool calls, also while it is still growing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def read(text: str, style: Style, *, final: bool) -> list[Block]:
    """Return the parts of an answer.

    While a text grows, its parts only grow: what may yet turn out to be the beginning of a marker is left
    out until ``final``.

    :param text: Without the token that ended the turn.
    """
    text, final = _until_stop(text, style.stop, final)
    blocks: list[Block] = []
    begin = _reasoning_begin(text, style)
    if begin is None:
        return _content(text, style, final, trimmed=False)
    if begin < 0:
        return [] if not final else _content(text, style, final, trimmed=False)
    end = text.find(THINK[1], begin)
    reasoning = text[begin : len(text) if end < 0 else end]
    if end < 0 and not final:
        reasoning = _without_beginning(reasoning, THINK[1:])
    if reasoning.strip():
        blocks.append(Block("reasoning", reasoning.strip()))
    return blocks if end < 0 else blocks + _content(text[end + len(THINK[1]) :], style, final, trimmed=True)


def _until_stop(text: str, stop: Iterable[str], final: bool) -> tuple[str, bool]:
    positions = [at for each in stop if (at := text.find(each)) >= 0]
    if positions:
        return text[: min(positions)], final
    return (text if final else _without_beginning(text, stop)), final


def _reasoning_begin(text: str, style: Style) -> int | None:
    """Return where the reasoning begins; ``None`` without any, and -1 where that cannot be told yet."""
    if not style.think:
        return None
    blank = len(text) - len(text.lstrip())
    if text.startswith(THINK[0], blank):
        return blank + len(THINK[0])
    if THINK[0].startswith(text[blank:]):
        return -1
    return 0 if style.opened else None


def _content(text: str, style: Style, final: bool, *, trimmed: bool) -> list[Block]:
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
    rest = text[begin:]
    if not final:
        shown = text[begin:at] if at >= 0 else _without_beginning(rest, (style.tools.start,))
        rest = shown.rstrip()
    return blocks + _text(rest, trimmed or bool(blocks))


def _text(text: str, trimmed: bool) -> list[Block]:
    text = text.lstrip() if trimmed else text
    return [Block("text", text)] if text.strip() else []


def _without_beginning(text: str, markers: Iterable[str]) -> str:
    """Return a text without what may be the beginning of a marker at its end."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return text[: len(text) - longest]
