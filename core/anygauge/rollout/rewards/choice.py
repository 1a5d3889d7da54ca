"""Multiple-choice questions."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from anygauge.rollout.rewards.conclusion import (
    SEVERAL,
    closing_letter,
    concluded,
    leading_letter,
    mentioned,
)
from anygauge.rollout.rewards.extraction import after_thinking, boxed
from anygauge.rollout.rewards.matching import required_label
from anygauge_hooks.errors import RewardError

__all__ = ["chosen_letter", "multiple_choice"]

_TAIL = 2000
"""Characters at either end of a response in which an answer is looked for."""
_EDGES = string.whitespace + "().:,;!?*_$[]{}`\"'"
_SPACE = re.compile(r"[\W_]+")
_WORD = re.compile(r"[^\W_]+")
_JOINTS = frozenset({"and", "or", "option", "options", "choice", "choices", "answer", "both"})

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


def multiple_choice(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1 if the response chooses the right one of several answers, else 0.

    :param response: The text of a sample; what is before ``</think>`` does not count.
    :param label: The letter, the index from 0, or the text of the right choice.
    :param metadata: ``choices`` may hold the choices: a list of texts, or an object from letter to text.
    """
    choices = _choices(metadata or {})
    expected = _expected(required_label("multiple_choice", label), choices)
    return float(chosen_letter(response, choices) == expected)


def chosen_letter(response: str, choices: Mapping[str, str]) -> str | None:
    r"""Return the letter that a response settles on, or ``None`` for none or several.

    In this order: the last ``\boxed{}``, if it is about a choice; the last "the answer is C", "C is correct"
    or "therefore C"; the one "option C" of the last sentence; a response or last line that is a letter or
    begins with one (``C) Paris``); the text of a choice.

    :param choices: Texts by letter; empty texts where only the letters are known.

    >>> chosen_letter("The answer is (C). Option A ignores the tax.", dict.fromkeys("ABCD", ""))
    'C'
    """
    text = after_thinking(response).strip()
    box = boxed(text[-_TAIL:])
    letter = _alone(text, choices) if box is None else _boxed_letter(plain(box), choices)
    if letter is None:
        letter = _told(text, choices)
    return letter if letter in choices else None


def _boxed_letter(text: str, choices: Mapping[str, str]) -> str | None:
    """Return the letter in a box, or ``None`` if the box holds something else, such as a number."""
    letter = _alone(text, choices) or _named(text, choices)
    if letter:
        return letter
    words = [word for word in _WORD.findall(text) if word.lower() not in _JOINTS]
    if len(words) == 1 and (letter := _alone(words[0], choices)):
        return letter
    if words and all(word.isupper() and (len(word) == 1 or set(word) <= choices.keys()) for word in words):
        return SEVERAL
    leading = leading_letter(text)
    return leading if leading in choices else None


def _told(text: str, choices: Mapping[str, str]) -> str | None:
    texts = {_words(text): letter for letter, text in list(choices.items())[::-1] if text}

    def named(text: str) -> str | None:
        return texts.get(_words(text)) if texts else None

    tail = plain(text[-_TAIL:])
    told = concluded(tail, named) or mentioned(tail)
    if told:
        return told
    head = tail if len(text) <= _TAIL else plain(text[:_TAIL])
    leading, closing = leading_letter(head), closing_letter(tail)
    if leading and closing and leading != closing:
        return closing
    return leading or closing or _alone(tail, choices) or named(tail)


def _alone(text: str, choices: Mapping[str, str]) -> str | None:
    letter = text.strip(_EDGES).upper()
    return letter if letter in choices else None


def _named(text: str, choices: Mapping[str, str]) -> str | None:
    words = _words(text)
    return next((letter for letter, choice in choices.items() if words and _words(choice) == words), None)


def _words(text: str) -> str:
    return _SPACE.sub(" ", text).strip().lower()


def _choices(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    choices = metadata.get("choices")
    if choices is None:
        return dict.fromkeys(string.ascii_uppercase[:10], "")
    if isinstance(choices, Mapping):
        return {str(letter).strip().upper(): str(text) for letter, text in choices.items()}
    if isinstance(choices, Sequence) and not isinstance(choices, str) and 0 < len(choices) <= 26:
        return dict(zip(string.ascii_uppercase, map(str, choices), strict=False))
    raise RewardError(
        f"The choices of a row are {choices!r:.80}",
        hint="Let metadata.choices be a list of up to 26 texts, or an object from letter to text.",
    )


def _expected(label: Any, choices: Mapping[str, str]) -> str:
    text = str(label).strip()
    letter = None if isinstance(label, int) else _alone(text, choices) or _named(text, choices)
    if letter is None and text.isdecimal() and int(text) < len(choices):
        letter = list(choices)[int(text)]
    if letter is None:
        raise RewardError(
            f"The label {label!r:.80} is none of the choices {', '.join(choices)}.",
            hint="data.label_key names the field with the letter, the index from 0, or the text of a choice.",
        )
    return letter


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
