r"""The reward of the DAPO recipe, https://arxiv.org/abs/2503.14476 section 2.4 equation 7."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from anygauge.rollout.rewards.extraction import boxed as boxed_answer
from anygauge.rollout.rewards.matching import required_label

__all__ = ["dapo", "normalized"]

_TAIL = 300
"""Characters at the end of a response that hold its answer."""
_BOX_TAIL = 100
_ANSWER = re.compile(r"Answer[\s*_]*:[\s*_]*([^\n]+)", re.IGNORECASE)
_INVALID = "[INVALID]"
_MATHEMATICS = re.compile(r"(?<!\\)\$([^$]+)\$")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf|overline)\s*\{([^{}]*)\}")
_UNITS = re.compile(
    r"(?<![A-Za-z\\])(?:an?\s+(?=[A-Za-z])|(?:square|ways|integers?|dollars?|mph|inch(?:es)?|hours?|minutes?|km|cm|gm|units?|points"
    r"|feet|digits|cents|degrees?|pounds|meters|meals|edges|students|multiples)(?![A-Za-z])(?:\^\{?[23]\}?)?)"
)
_NOISE = re.compile(
    r"\\[$ ;!,()\[\]]|\\l?dots|\^\s*\{?\\circ\}?|\{,\}|[\s\"$]|\\(?=%)|<\|(?:im_end|endoftext|eot_id)\|>|</s>"
)
_SIGNS = str.maketrans({"\u2212": "-", "\u00a0": " ", "\u202f": " ", "\u00b0": ""})
"""Minus signs, spaces and degrees as they are written outside ASCII."""
_SHORT_FRACTION = re.compile(r"\\[dt]?frac([^{\\])([^{\\])")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\[\\])")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def dapo(response: str, label: Any, *, boxed: bool = False) -> dict[str, Any]:
    r"""Return ``{"score": 1 or -1, "acc": bool, "pred": str}`` for the final answer of a response.

    The answer is what follows the last ``Answer:`` among the last 300 characters. It and the label are
    normalized like the answers of Minerva (https://arxiv.org/abs/2206.14858 appendix D.1), and compared as
    text: ``1/2`` is not ``0.5``, and ``34.0`` is not ``34``.

    :param response: The text of a sample.
    :param label: An integer, or a number or expression as text.
    :param boxed: Take what is in the last ``\boxed{}`` of the last 100 characters, and compare it as it is.
    """
    expected = str(required_label("dapo", label)).strip()
    if boxed:
        answer = boxed_answer(response[-_BOX_TAIL:])
        return _verdict(answer == expected, answer or _INVALID)
    answers = _ANSWER.findall(response[-_TAIL:])
    answer = normalized(answers[-1]) if answers else ""
    return _verdict(answer != "" and answer in _expected(expected), answer or _INVALID)


def _verdict(correct: bool, answer: str) -> dict[str, Any]:
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer}


@lru_cache(maxsize=1024)
def _expected(label: str) -> frozenset[str]:
    """Return a label normalized, for ``34.0`` also as ``34``: the recipe's answers are all integers."""
    expected = normalized(label)
    integral = re.fullmatch(r"[-+]?\d{1,15}\.0*", expected)
    return frozenset({expected, str(int(float(expected)))} if integral else {expected})


def normalized(answer: str) -> str:
    r"""Return an answer without units, spaces and the many ways to write one thing.

    >>> normalized(r"x = $1,200\text{ dollars}$.")
    '1200'
    """
    answer = answer.translate(_SIGNS).rpartition("=")[2].lstrip(" \t*_`").rstrip(" \t*_`.")
    marked = _MATHEMATICS.search(answer)
    answer = marked[1] if marked else answer
    answer = boxed_answer(answer) or answer
    answer = _UNITS.sub("", _WRAPPER.sub(r"\1", answer))
    answer = _NOISE.sub("", answer)
    answer = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", answer)
    answer = _SHORT_ROOT.sub(r"\\sqrt{\1}", answer)
    answer = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").removesuffix(".")
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
