"""Text-matching rewards."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from anygauge_hooks.errors import RewardError

__all__ = ["exact_match", "f1", "required_label"]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SIGNS_OF_NUMBERS = re.compile(r"(?<![^\W\d])\.(?=\d)|(?<!\S)[-\u2212](?=\.?\d)")
_KEPT = str.maketrans("-.\u2212", "\ue000\ue001\ue000")
_NO_SPACES = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff])")
"""Characters of scripts that do not set words apart."""


def exact_match(
    response: str, label: Any, metadata: Mapping[str, Any] | None = None, *, strip: bool = True
) -> float:
    """Return 1 if the response is the label, else 0.

    :param response: The text of a sample.
    :param label: A string, or a number or boolean that is compared as the string it prints as.
    :param metadata: Not used.
    :param strip: Ignore white space around both.
    """
    expected = _text(required_label("exact_match", label))
    if strip:
        response, expected = response.strip(), expected.strip()
    return float(response == expected)


def f1(response: str, label: Any) -> float:
    """Return the F1 of the words that a response and its label share.

    As SQuAD does it (https://arxiv.org/abs/1606.05250 section 6.1): lower case, without punctuation and the
    articles a, an and the. Unlike there, -3.5 and 35 are two numbers, punctuation and letters are those of
    Unicode, and a Chinese or Japanese character is a word. Where one of the two has no words, the reward is 1
    if both have none, as in SQuAD 2.0 (https://arxiv.org/abs/1806.03822).

    :param response: The text of a sample.
    :param label: A string or number, or a list of them, of which the best counts.
    """
    labels = required_label("f1", label)
    if not isinstance(labels, (list, tuple)):
        labels = [labels]
    if not labels:
        raise RewardError("The label is an empty list.", hint="Give at least one answer in each row.")
    words = _words(response)
    return max(_f1(words, _label_words(_text(each))) for each in labels)


def required_label(function: str, label: Any) -> Any:
    """Return a label that a function cannot do without.

    :raises RewardError: There is none.
    """
    if label is None:
        raise RewardError(f"{function} needs a label.", hint="Set data.label_key.")
    return label


def _text(label: Any) -> str:
    if isinstance(label, (list, dict)):
        raise RewardError(
            f"The label is a {type(label).__name__}: {label!r:.80}",
            hint="Let data.label_key name a field with a string, a number or a boolean.",
        )
    return str(label)


def _words(text: str) -> list[str]:
    text = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text.lower())
    text = _SIGNS_OF_NUMBERS.sub(lambda sign: sign[0].translate(_KEPT), text)
    if not text.isascii():
        text = _NO_SPACES.sub(r" \1 ", "".join(each for each in text if unicodedata.category(each)[0] != "P"))
    return _ARTICLES.sub(" ", text.translate(_NO_PUNCTUATION)).split()


@lru_cache(maxsize=1024)
def _label_words(label: str) -> list[str]:
    """Return the words of a label; the samples of a group share it."""
    return _words(label)


def _f1(words: Sequence[str], expected: Sequence[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    shared = (Counter(words) & Counter(expected)).total()
    return 2 * shared / (len(words) + len(expected))
