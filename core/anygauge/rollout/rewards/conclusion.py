"""Extract the conclusion of a text about a multiple-choice question, in the phrases that models use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from anygauge.rollout.rewards.phrases import (
    ALONE,
    ANSWER,
    END,
    LEADING,
    MARKED,
    MENTION,
    MORE,
    NO_CHOICE,
    NOT_A_CHOICE,
    REJECTED,
    REJECTING,
    RIGHT,
    SENTENCE,
    SO,
    TAKEN_BACK,
    VALUE,
)

__all__ = ["SEVERAL", "closing_letter", "concluded", "leading_letter", "mentioned"]

SEVERAL = "several"
"""In place of a letter: the text settles on more or fewer than one choice."""
_CONTEXT = 48
"""Characters before a conclusion that may take it back."""
_NEAR = 300
"""Characters at the end of a text, where most conclusions are."""


def concluded(text: str, named: Callable[[str], str | None]) -> str | None:
    """Return the letter of the last explicit conclusion of a plain text, ``SEVERAL``, or ``None``.

    Such are "the answer is C", "C is correct", "therefore C", "I choose C".

    :param named: Returns the letter of the choice of which it is given the text, or ``None``.
    """
    for start in dict.fromkeys((max(0, len(text) - _NEAR), 0)):
        conclusion = max(_conclusions(text, start, named), default=None)
        if conclusion:
            return conclusion[1]
    return None


def _conclusions(text: str, start: int, named: Callable[[str], str | None]) -> Iterator[tuple[int, str]]:
    """Yield the conclusions from ``start`` on, and where they are."""
    for cue in ANSWER.finditer(text, start):
        letter = _stated_letter(text, cue.end(), named)
        if letter and not _before(cue, TAKEN_BACK):
            yield cue.end(), letter
    for cue in SO.finditer(text, start):
        value = VALUE.match(text, cue.end())
        if value and not _before(cue, TAKEN_BACK):
            several = MORE.match(text, value.end())
            if several or END.match(text, value.end()):
                yield value.start(), SEVERAL if several else _letter(value)
    for cue in RIGHT.finditer(text, start):
        if not _before(cue, TAKEN_BACK) and not _before(cue, NOT_A_CHOICE):
            yield cue.start(), cue["upper"].upper()


def _before(cue: re.Match[str], pattern: re.Pattern[str]) -> bool:
    """Return whether a pattern ends where a cue begins."""
    return pattern.search(cue.string, max(0, cue.start() - _CONTEXT), cue.start()) is not None


def _stated_letter(text: str, start: int, named: Callable[[str], str | None]) -> str | None:
    """Return what follows "the answer is" as a letter."""
    value = VALUE.match(text, start)
    if value:
        return SEVERAL if MORE.match(text, value.end()) else _letter(value)
    line = text[start : start + _NEAR].lstrip(" \t\n:").partition("\n")[0]
    letter = named(line) or named(line.partition(". ")[0])
    return letter or (SEVERAL if NO_CHOICE.match(text, start) else None)


def _letter(match: re.Match[str]) -> str:
    return next(letter for letter in match.group("inside", "before", "upper", "lower") if letter).upper()


def mentioned(text: str) -> str | None:
    """Return the one letter that the last sentence of a plain text speaks for as "option C", or ``None``."""
    start = max((match.end() for match in SENTENCE.finditer(text)), default=0)
    letters = {
        _letter(match)
        for match in MENTION.finditer(text, start)
        if not REJECTED.match(text, match.end()) and not REJECTING.search(text, start, match.start())
    }
    return letters.pop() if len(letters) == 1 else None


def leading_letter(text: str) -> str | None:
    """Return the letter that a plain text begins with (``C) Paris``), unless it lists the choices."""
    leading = LEADING.match(text)
    if leading is None:
        return None
    letter = _letter(leading)
    following = MARKED.search(text, leading.end())
    return None if following and ord(following[1].upper()) == ord(letter) + 1 else letter


def closing_letter(text: str) -> str | None:
    """Return the letter that is, or begins, the last line or sentence of a plain text (``C) Paris``).

    None if it ends a list of the choices.
    """
    # Two, because the full stop of "C. Paris" looks like the end of a sentence.
    for start in [0, *(match.end() for match in SENTENCE.finditer(text))][:-3:-1]:
        alone = ALONE.match(text, start)
        if alone:
            return _letter(alone)
        closing = LEADING.match(text, start)
        if closing:
            letter = _letter(closing)
            marked = [match[1].upper() for match in MARKED.finditer(text, 0, start)]
            return None if marked and ord(marked[-1]) == ord(letter) - 1 else letter
    return None
