"""Escape control characters in texts of models, data, agents and servers, before they are shown or logged."""

from __future__ import annotations

import logging
import re
import traceback
import warnings

__all__ = ["VisibleFormatter", "format_exception", "format_warning", "visible"]

# C0 and C1 but for newline and tab, line and paragraph separators, bidirectional embeddings, overrides and
# isolates, and code points that are no characters.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]",
)

_format_warning = warnings.formatwarning


def visible(text: str) -> str:
    r"""Return a text with an escape sequence of Python for each control character.

    A terminal executes such characters: they move its cursor, set its title and reorder a line. HTML must not
    contain them.

    >>> print(visible("a\x1b[2Kb\u202e"))
    a\x1b[2Kb\u202e
    """
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def format_exception(error: BaseException) -> str:
    """Return a traceback as Python prints it, without control characters."""
    return visible("".join(traceback.format_exception(error)))


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning as Python does, without control characters that libraries may quote.

    For ``warnings.formatwarning``.
    """
    return visible(_format_warning(message, category, filename, lineno, line))


class VisibleFormatter(logging.Formatter):
    """Formats records without control characters, in the message and in the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return visible(super().format(record))
