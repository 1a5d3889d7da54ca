"""Extract the final answer from a response."""

from __future__ import annotations

import re

__all__ = ["after_thinking", "boxed"]

# Two backslashes: as a line break before the box, or written by a model that has seen escaped text.
_TOKEN = re.compile(r"(?P<box>\\\\?(?:boxed|fbox)\s*\{)|\\.|[{}]", re.S)
_END_OF_THINKING = "</think>"


def boxed(text: str) -> str | None:
    r"""Return what is in the last complete ``\boxed{}`` or ``\fbox{}`` of a text, or ``None`` if it has none.

    >>> boxed(r"First \boxed{1}, then \boxed{ \frac{1}{2} } and \boxed{")
    '\\frac{1}{2}'
    """
    if "box" not in text:
        return None
    opened: list[int | None] = []
    content, content_start = None, -1
    # One pass from the left: searching backwards from each box takes quadratic time where none is closed.
    for token in _TOKEN.finditer(text):
        if token["box"]:
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start is not None and start > content_start:
                content, content_start = text[start : token.start()].strip(), start
    return content


def after_thinking(text: str) -> str:
    """Return what follows the last ``</think>``: all of the text where there is none."""
    return text.rpartition(_END_OF_THINKING)[2]
