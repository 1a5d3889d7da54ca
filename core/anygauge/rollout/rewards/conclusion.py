r"""What a text about a multiple-choice question concludes, by the ways in which models say so."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator

__all__ = ["SEVERAL", "closing_letter", "concluded", "leading_letter", "mentioned", "plain"]

SEVERAL = "several"
"""In place of a letter: the text settles on more or fewer than one choice."""
_CONTEXT = 48
"""Characters before a conclusion that may take it back."""
_NEAR = 300
"""Characters at the end of a text, where most conclusions are."""

_MACRO = re.compile(
    r"\\(?:(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|sf|it|bb|cal)|mbox|boxed|fbox|bf|rm|left|right)(?![A-Za-z])|[()\[\]])"
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

# A letter in brackets or before a bracket may be of either case. Alone it must be told from a word ("a dog",
# "I think"), a part of one (B-cell, C's), a variable (A = 5) and an initial (J. K. Rowling).
_BECAUSE = r"(?:because|since|as|for|which|not|rather|instead|due|given)\b"
_LETTER = rf"""["']?(?:
    [(\[]{{1,2}}\s?(?P<inside>[A-Za-z])\s?[)\]]{{1,2}}
    |(?P<before>[A-Za-z])[)\]]
    |(?P<upper>[A-Z])(?![A-Za-z0-9]|['\-.][A-Za-z]|\s*[=^]|\.\s?[A-Z]\.\s?[A-Z][a-z])
        (?!(?<=A)\s+(?!(?i:{_BECAUSE}|and\b|or\b|is\b))[a-z])(?!(?<=I)(?:'|\s+[A-Za-z]))
    |(?P<lower>[a-z])(?=[.,;:!?](?!\w)|\s*$|[ \t]*\n)
)["']?"""
_MORE = re.compile(
    r"""\s*(?:,\s*(?:(?:and|or)\s+)?|and\s+|or\s+|&\s*|/\s*|\+\s*)(?:(?:option|choice)\s+)?
    (?:[(\[]\s?[A-Za-z]\s?[)\]]|[A-Z](?![A-Za-z0-9'])|[a-z](?=\s*$))
    (?=\s*(?:$|\n|[.,;:!?&/+]|(?:and|or|are|both|together|because|since|as)\b))""",
    re.X,
)
_FILLER = r"""(?:(?:[:,\-]|(?:clearly|definitely|certainly|probably|most\s+likely|likely|therefore|thus|hence
    |indeed|simply|obviously|actually|then|now|still|in\s+fact|either|both|option|choice|answer|letter|the|number
    |i\s+(?:think|believe|guess|would\s+say)|i'd\s+say)(?!\w))[\s,:]*){0,6}+"""
_VALUE = re.compile(rf"\s*(?i:{_FILLER}){_LETTER}", re.X)
_BE = r"""(?:(?:is|was|(?:must|would|should|will|(?:has|have|ought|seems|appears)\s+to|can\s+only)\s+
    (?:therefore\s+|then\s+|thus\s+)?be)\b)"""

_ANSWER = re.compile(
    rf"""(?:\b(?:answers?|solution|choice|option|pick|guess|selection|conclusion|(?:correct|right|best)\s+one)\b
        (?:\s+(?:choice|option|letter|left|remaining))?
        (?:\s+(?:to|for|of|here|among|from)\b[^.\n:]{{0,60}}?|\s*,[^,.\n]{{0,30}},|\s*\([^()\n]{{1,30}}\))?
        \s*(?:{_BE}|[:=]|-+>?)
    |\banswer(?=[ \t]*\n|[ \t]+\(?[A-Z]\)?[ \t]*(?:[.!]|$|\n))
    |(?:^|\n)[ \t]*(?:A(?=:\s*\(?[A-Z]\)?[ \t]*(?:[.!]|$|\n))|correct(?=:)):
    |\u7b54\u6848(?:\u5e94\u8be5?)?[\u662f\u4e3a:\s]*|(?<!\u4e0d)\u9009(?!\u9879)[\u62e9\u662f:\s]*
    )""",
    re.X | re.I,
)
_SO = re.compile(
    rf"""\b(?:therefore|thus|hence|so|consequently|accordingly|finally|then|in\s+conclusion
        |(?:it|that|this)(?:'s|\s+{_BE})|only|leaves|leaving(?:\s+us\s+with)?|must\s+be
        |choose|chose|choosing|pick|picking|select|selecting|go(?:ing)?\s+(?:with|for)|(?:settle|opt|vote)\s+(?:on|for)
        |i(?:'d|\s+would)?\s+(?:say|guess)|match(?:es)?|corresponds\s+to)
        (?=[\s,:(])""",
    re.X | re.I,
)
_END = re.compile(rf"\s*(?:[.;:!]|$|\n|,?\s*{_BECAUSE})|(?<=[)\]])\s+[A-Z0-9]")
_RIGHT = re.compile(
    rf"""(?<![A-Za-z0-9'\-])[(\[]?(?P<upper>[A-Z]|(?<=(?:option|choice)[ ])[a-z])(?:[)\]]|(?=[\s.:,]))
    (?:\s*\([^()\n]{{1,60}}\)|(?:[.:]|(?<=[)\]]))\s+(?!(?:is|would|must|seems|has|looks|appears)\b)[^.,;:\n]{{1,60}}?|[.:])?
    (?:\s*\u662f?(?:\u6b63\u786e|\u5bf9)
    |\s+(?i:{_BE}|seems(?:\s+to\s+be)?|appears(?:\s+to\s+be)?|looks)\s+
        (?i:(?:the|our|my|a|clearly|indeed|definitely|obviously|therefore|thus|actually|most|only|single|one|best|also)\s+)*
        (?i:correct|right|best|answer|(?<=best\s)(?:choice|option|fit)|(?<=only\s)(?:choice|option)
            |(?:appropriate|likely|accurate|plausible|suitable)\s+(?:answer|choice|option))
        (?![\w\-]|\s+(?:only|if|in|about|but|except|when|under|angle|triangle)\b))""",
    re.X,
)
_TAKEN_BACK = re.compile(
    r"""(?:\b(?:not|n't|never|cannot)\s+(?:think|believe|say|mean|true|certain|sure|likely|clear|claim|the\s+case)
        |n't\s+(?:think|believe|say|mean|claim)|\b(?:if|whether|unless|suppose|assum(?:e|ing)|doubt|say|claims?|while|although|though))
    (?:\s+(?:that|why|how|whether|if))?(?:\s+(?:the|option|choice))?(?:\s+(?:correct|right|best|final))?[\s(]*$
    |\b(?:not|never|n't)\s+(?:the\s+)?(?:\w+\s+)?$""",
    re.X | re.I,
)
_NOT_A_CHOICE = re.compile(
    r"""(?:\b(?:angle|point|vitamin|triangle|type|group|figure|line|statement|hepatitis|grade|set|matrix|event|variable
    |side|student|person|company|country|team)|(?<![A-Za-z0-9])[A-Za-z][)\]]?\s*(?:and|or|nor|&|/))\s*[(\[]?$""",
    re.X | re.I,
)
_NO_CHOICE = re.compile(
    rf"\s*(?i:{_FILLER})(?i:none|neither|all\s+of|any\s+of|nothing|unclear|unknown)\b", re.X
)

_MENTION = re.compile(
    rf"(?i:\b(?:option|choice|answer|letter)\s+|\b(?:could|may|might|can)\s+be\s+)(?i:{_FILLER}){_LETTER}",
    re.X,
)
_REJECTED = re.compile(
    r"""\s*(?:(?:is|are|was|would\s+be|seems|looks)\s+)?(?:clearly\s+|also\s+|simply\s+)*
    (?:an?\b|too\b|not\b|n't|in(?:correct|valid|accurate)|wrong|false|out\b|impossible|irrelevant|tempting|ruled|eliminated|ignores|fails
    |contradicts|does\s*n[o']t|doubles|cannot|can't|isn't|is\s+un)""",
    re.X | re.I,
)
_REJECTING = re.compile(
    r"\b(?:not|unlike|than|over|eliminates?|eliminating|out|excludes?|rejects?|against|without)\s+(?:the\s+)?$",
    re.I,
)
_SENTENCE = re.compile(r"[.!?]\s+(?=[A-Z(])|\n")
_LEADING = re.compile(
    rf"\s*(?i:(?:option|choice)\s+)?{_LETTER}(?:(?<=[)\]])|[).:]|[ \t]*(?:\n|$)|\s+-|,?\s+{_BECAUSE})"
    r"(?!\s*(?:is|are|was|seems|looks|can|cannot|would|could|may|might|has|does|says)\b)",
    re.X,
)
_ALONE = re.compile(rf"\s*(?i:{_FILLER}){_LETTER}[.!?]?\s*$", re.X)
_MARKED = re.compile(r"(?:^|[\n.!?;:])[ \t]*(?:(?:option|choice)\s+)?[(\[]?([A-Z])[)\].:](?![\w.])", re.I)


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


def concluded(text: str, named: Callable[[str], str | None]) -> str | None:
    """Return the letter of the last explicit conclusion of a plain text, ``SEVERAL``, or ``None``.

    Such are "the answer is C", "C is correct", "therefore C", "I choose C".

    :param named: Returns the letter of the choice of which it is given the text, or ``None``.
    """
    for start in dict.fromkeys((max(0, len(text) - _NEAR), 0)):
        found = max(_conclusions(text, start, named), default=None)
        if found:
            return found[1]
    return None


def _conclusions(text: str, start: int, named: Callable[[str], str | None]) -> Iterator[tuple[int, str]]:
    """Yield the conclusions from ``start`` on, and where they are."""
    for cue in _ANSWER.finditer(text, start):
        letter = _answered(text, cue.end(), named)
        if letter and not _before(cue, _TAKEN_BACK):
            yield cue.end(), letter
    for cue in _SO.finditer(text, start):
        value = _VALUE.match(text, cue.end())
        if value and not _before(cue, _TAKEN_BACK):
            several = _MORE.match(text, value.end())
            if several or _END.match(text, value.end()):
                yield value.start(), SEVERAL if several else _letter(value)
    for cue in _RIGHT.finditer(text, start):
        if not _before(cue, _TAKEN_BACK) and not _before(cue, _NOT_A_CHOICE):
            yield cue.start(), cue["upper"].upper()


def _before(cue: re.Match[str], pattern: re.Pattern[str]) -> bool:
    """Return whether a pattern ends where a cue begins."""
    return pattern.search(cue.string, max(0, cue.start() - _CONTEXT), cue.start()) is not None


def _answered(text: str, start: int, named: Callable[[str], str | None]) -> str | None:
    """Return what follows "the answer is" as a letter."""
    value = _VALUE.match(text, start)
    if value:
        return SEVERAL if _MORE.match(text, value.end()) else _letter(value)
    line = text[start : start + _NEAR].lstrip(" \t\n:").partition("\n")[0]
    letter = named(line) or named(line.partition(". ")[0])
    return letter or (SEVERAL if _NO_CHOICE.match(text, start) else None)


def _letter(match: re.Match[str]) -> str:
    return next(letter for letter in match.group("inside", "before", "upper", "lower") if letter).upper()


def mentioned(text: str) -> str | None:
    """Return the one letter that the last sentence of a plain text speaks for as "option C", or ``None``."""
    start = max((match.end() for match in _SENTENCE.finditer(text)), default=0)
    letters = {
        _letter(match)
        for match in _MENTION.finditer(text, start)
        if not _REJECTED.match(text, match.end()) and not _REJECTING.search(text, start, match.start())
    }
    return letters.pop() if len(letters) == 1 else None


def leading_letter(text: str) -> str | None:
    """Return the letter that a plain text begins with (``C) Paris``), unless it lists the choices."""
    leading = _LEADING.match(text)
    if leading is None:
        return None
    letter = _letter(leading)
    following = _MARKED.search(text, leading.end())
    return None if following and ord(following[1].upper()) == ord(letter) + 1 else letter


def closing_letter(text: str) -> str | None:
    """Return the letter that is, or begins, the last line or sentence of a plain text (``C) Paris``).

    None if it ends a list of the choices.
    """
    # Two, because the full stop of "C. Paris" looks like the end of a sentence.
    for start in [0, *(match.end() for match in _SENTENCE.finditer(text))][:-3:-1]:
        alone = _ALONE.match(text, start)
        if alone:
            return _letter(alone)
        closing = _LEADING.match(text, start)
        if closing:
            letter = _letter(closing)
            marked = [match[1].upper() for match in _MARKED.finditer(text, 0, start)]
            return None if marked and ord(marked[-1]) == ord(letter) - 1 else letter
    return None
