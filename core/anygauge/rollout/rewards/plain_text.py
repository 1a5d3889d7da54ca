"""Strip the markup from a text."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["plain"]

_MACRO = re.compile(
    r"""\\(?:
    (?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|sf|it|bb|cal)|mbox|boxed|fbox|bf|rm|left|right)(?![A-Za-z])
    |[()\[\]])""",
    re.X,
)
_TAG = re.compile(r"</?(?:b|i|em|strong|u|p)>", re.I)
_UNDERLINE = re.compile(r"(?<!\w)_+|_+(?!\w)")
_BULLET = re.compile(r"\n[ \t]*(?:#+|>|[-+])[ \t]+")
_BLANK = re.compile(r"\\(?:quad|qquad|[ ,;:!])")
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.I)
_MARKS = str.maketrans("", "", "{}$*`~")
_SIGNS = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u3002": ". ", "\u3001": ", "}
    | dict.fromkeys("\u2013\u2014\u2212\u2192\u21d2", "-")
)


def plain(text: str) -> str:
    r"""Return a text without markup of Markdown, LaTeX and HTML, in plain punctuation.

    >>> plain(r"**Answer**: $\textbf{(C)}$")
    'Answer: (C)'
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.translate(_SIGNS))
    # Most responses have little markup, and a look for one character is quick.
    if "<" in text:
        text = _TAG.sub("", _ANSWER_TAG.sub(lambda tag: "\n" if tag[1] else "\nanswer: ", text))
    if "\\" in text:
        text = _MACRO.sub("", _BLANK.sub(" ", text))
    if "_" in text:
        text = _UNDERLINE.sub("", text)
    return _BULLET.sub("\n", "\n" + text.translate(_MARKS)).strip()
