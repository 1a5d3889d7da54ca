"""Multiple-choice questions."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from anygauge.rollout.rewards.extraction import after_thinking, boxed
from anygauge.rollout.rewards.matching import required_label
from anygauge_hooks.errors import RewardError

__all__ = ["chosen_letter", "multiple_choice"]

_TAIL = 2000
"""Characters at the end of a response in which an answer is looked for."""
_EDGES = string.whitespace + "().:,;*_$[]{}`\"'"
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_SAID = re.compile(
    r"\b(?:answer|option|choice)\b(?:\s+is\b|\s*[:=])?(?:\s+option\b)?[\s*_:$({\[\\]{0,8}([A-Z])(?![A-Za-z0-9'])",
    re.IGNORECASE,
)
_CORRECT = re.compile(r"(?<![A-Za-z0-9])([A-Z])[)\]*_.]{0,3}\s+is\s+(?:the\s+)?(?:correct|right)\b")
_LEADING = re.compile(r"^[\s*_(\[]{0,4}([A-Z])[)\].:*_]")
_SPACE = re.compile(r"[\W_]+")


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
    r"""Return the letter that a response settles on, or ``None``.

    In this order: the last ``\boxed{}``, the last "answer is C" or "C is correct", a response that is a
    letter alone or begins with one (``C) Paris``), a last line that is a letter, the text of a choice.

    :param choices: Texts by letter; empty texts where only the letters are known.

    >>> chosen_letter("A is tempting, but the answer is (C).", dict.fromkeys("ABCD", ""))
    'C'
    """
    text = after_thinking(response)
    box = boxed(text)
    if box is not None:
        return _alone(_TEXT_MACRO.sub(r"\1", box), choices) or _named(box, choices)
    text = text[-_TAIL:].strip()
    said = [match for pattern in (_SAID, _CORRECT) for match in pattern.finditer(text)]
    for match in sorted(said, key=lambda match: match.start(), reverse=True):
        # "the answer is a matter of taste" names no choice; "answer: a" does.
        letter = match[1].upper()
        if letter in choices and (match[1].isupper() or not text[match.end() :].strip(_EDGES)):
            return letter
    lines = text.splitlines() or [""]
    leading = _LEADING.match(text)
    if leading and leading[1] in choices and not _alone(lines[-1], choices):
        return leading[1]
    return _alone(text, choices) or _alone(lines[-1], choices) or _named(text, choices)


def _alone(text: str, choices: Mapping[str, str]) -> str | None:
    letter = text.strip(_EDGES).upper()
    return letter if letter in choices else None


def _named(text: str, choices: Mapping[str, str]) -> str | None:
    plain = _plain(text)
    return next((letter for letter, choice in choices.items() if plain and _plain(choice) == plain), None)


def _plain(text: str) -> str:
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
