"""The ``math`` reward: equivalence of mathematical expressions, by the math-verify library."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Mapping
from typing import Any, NoReturn

from anygauge.rollout.rewards.matching import required_label
from anygauge_hooks.errors import RewardError

__all__ = ["math"]

logger = logging.getLogger(__name__)

_LONGEST_S = 1e6
"""More, no timer counts."""
_HASH_ANSWER = re.compile(r"####\s*([-+]?\s*(?:\\?\$)?\s*[-+]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*[1-9]\d*)?)")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MINUS = "\u2212"
_DELIMITERS = ("\\boxed", "$", "\\(", "\\[")


class _OutOfTime(BaseException):
    """The CPU time is used up. The library catches every :class:`Exception`."""


def math(
    response: str, label: Any, metadata: Mapping[str, Any] | None = None, *, timeout_s: float = 5.0
) -> float:
    r"""Return 1 if the answer in the response equals the label as mathematics, else 0.

    The answer is what is in ``\boxed{}``, else the number after ``####``, else the last expression.

    :param response: The text of a sample.
    :param label: A number, or a string with an expression: alone, boxed, or after ``####`` as in GSM8K.
    :param metadata: Not used.
    :param timeout_s: CPU seconds; an answer that takes longer to judge is wrong.
    :raises RewardError: The label holds no expression.
    :raises ValueError: Called off the main thread, where Python handles no signals.
    """
    expected = str(required_label("math", label))
    _import_library()
    previous = signal.signal(signal.SIGPROF, _stop)
    try:
        # Repeated, since Python drops an exception that is raised in a destructor.
        signal.setitimer(signal.ITIMER_PROF, min(timeout_s, _LONGEST_S), min(timeout_s, _LONGEST_S))
        return float(_equal(response, expected))
    except _OutOfTime:
        logger.warning("math: no verdict in time, counted as wrong: %.80r", response)
        return 0.0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _stop(*_: Any) -> NoReturn:
    raise _OutOfTime


def _import_library() -> None:
    # A signal interrupts a long operation on Python's integers, and none on gmpy2's, which sympy and mpmath
    # use if they find it.
    os.environ.setdefault("SYMPY_GROUND_TYPES", "python")
    os.environ.setdefault("MPMATH_NOGMPY", "1")
    import math_verify  # noqa: F401 - outside the time limit

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def _equal(response: str, label: str) -> bool:
    from math_verify import verify

    gold = _gold(label)
    if not gold:
        raise RewardError(
            f"The label {label!r} holds no mathematical expression.",
            hint="data.label_key names the field of the expected answer.",
        )
    return bool(verify(gold, _answer(response), timeout_seconds=None))


def _gold(label: str) -> list[Any]:
    """Parse a label, all of which is the answer."""
    text = label.rpartition("####")[2].strip().removesuffix(".")
    if any(delimiter in text for delimiter in _DELIMITERS):
        return _parse(text)
    return _parse(f"\\boxed{{{text}}}") or _parse(text)


def _answer(response: str) -> list[Any]:
    """Parse the answer of a response: boxed, else the last number after ``####``, else what is found last."""
    response = _BOX.sub(lambda _: "\\boxed{", response.replace(_MINUS, "-"))
    marked = _HASH_ANSWER.findall(response)
    if marked and "\\boxed" not in response:
        number = re.sub(r"[\s$,\\]", "", marked[-1])
        return _parse(f"\\boxed{{{number}}}")
    return _parse(response)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))
