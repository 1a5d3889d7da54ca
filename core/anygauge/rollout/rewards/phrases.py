r"""Phrases that state the answer to a multiple-choice question.

A pattern with several forms is a table whose keys are examples, each of which its form alone finds: see
``tests/unit/rollout/test_reward_phrases.py``. In a list of phrases, a blank stands for any white space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = [
    "ALONE",
    "ANSWER",
    "END",
    "FORMS",
    "LEADING",
    "MARKED",
    "MENTION",
    "MORE",
    "NOT_A_CHOICE",
    "NO_CHOICE",
    "REJECTED",
    "REJECTING",
    "RIGHT",
    "SENTENCE",
    "SO",
    "TAKEN_BACK",
    "VALUE",
]


def _words(phrases: str) -> str:
    """Return a pattern for any of the phrases that ``|`` divides."""
    return "(?:" + "|".join(phrase.strip().replace(" ", r"\s+") for phrase in phrases.split("|")) + ")"


def _any_of(forms: Mapping[str, str]) -> str:
    return "(?:" + "|".join(forms.values()) + ")"


# -------------------------------------------------------------------------
# A letter, and what may stand around it
# -------------------------------------------------------------------------

_BECAUSE = _words("because | since | as | for | which | not | rather | instead | due | given") + r"\b"
_BE = rf"""(?:(?:is|was
    |{_words("must | would | should | will | has to | have to | ought to | seems to | appears to | can only")}
        \s+(?:{_words("therefore | then | thus")}\s+)?be)\b)"""
_ADVERBS = _words(
    "clearly | definitely | certainly | probably | most likely | likely | therefore | thus | hence | indeed"
    "| simply | obviously | actually | then | now | still | in fact | either | both | option | choice"
    "| answer | letter | the | number | i think | i believe | i guess | i would say | i'd say"
)
_FILLER = rf"(?i:(?:(?:[:,\-]|{_ADVERBS}(?!\w))[\s,:]*){{0,6}}+)"
"""Words between "is" and the letter."""

# Alone, a letter must be told from a word ("a dog", "I think"), a part of one (B-cell, C's), a variable
# (A = 5) and an initial (J. K. Rowling).
_NO_PART = r"(?![A-Za-z0-9]|['\-.][A-Za-z]|\s*[=^]|\.\s?[A-Z]\.\s?[A-Z][a-z])"
_NO_ARTICLE = rf"(?!(?<=A)\s+(?!(?i:{_BECAUSE}|and\b|or\b|is\b))[a-z])"
_NO_PRONOUN = r"(?!(?<=I)(?:'|\s+[A-Za-z]))"
_LETTERS = {
    "(c)": r"[(\[]{1,2}\s?(?P<inside>[A-Za-z])\s?[)\]]{1,2}",
    "c)": r"(?P<before>[A-Za-z])[)\]]",
    "C": rf"(?P<upper>[A-Z]){_NO_PART}{_NO_ARTICLE}{_NO_PRONOUN}",
    "c.": r"(?P<lower>[a-z])(?=[.,;:!?](?!\w)|\s*$|[ \t]*\n)",
}
_LETTER = rf"""["']?{_any_of(_LETTERS)}["']?"""

VALUE = re.compile(rf"\s*{_FILLER}{_LETTER}", re.X)
"""``: clearly (C)``"""
MORE = re.compile(
    r"""\s*(?:,\s*(?:(?:and|or)\s+)?|and\s+|or\s+|&\s*|/\s*|\+\s*)(?:(?:option|choice)\s+)?
    (?:[(\[]\s?[A-Za-z]\s?[)\]]|[A-Z](?![A-Za-z0-9'])|[a-z](?=\s*$))
    (?=\s*(?:$|\n|[.,;:!?&/+]|(?:and|or|are|both|together|because|since|as)\b))""",
    re.X,
)
"""A further letter after one: ``and D.``"""
END = re.compile(rf"\s*(?:[.;:!]|$|\n|,?\s*{_BECAUSE})|(?<=[)\]])\s+[A-Z0-9]")
"""After a letter, no more is said of it: ``because``."""
NO_CHOICE = re.compile(
    rf"\s*{_FILLER}(?i:{_words('none | neither | all of | any of | nothing | unclear | unknown')})\b", re.X
)
"""In place of a letter: ``none of these``."""

# -------------------------------------------------------------------------
# Before and around the letter of a conclusion
# -------------------------------------------------------------------------

_ANSWER_NOUN = _words(
    "answers? | solution | choice | option | pick | guess | selection | conclusion"
    "| correct one | right one | best one"
)
_OF_THIS = r"""(?:\s+(?:choice|option|letter|left|remaining))?
    (?:\s+(?:to|for|of|here|among|from)\b[^.\n:]{0,60}?|\s*,[^,.\n]{0,30},|\s*\([^()\n]{1,30}\))?"""
_LONE_LETTER = r"\(?[A-Z]\)?[ \t]*(?:[.!]|$|\n)"
_ANSWERS = {
    "The best choice left for us is": rf"\b{_ANSWER_NOUN}\b{_OF_THIS}\s*(?:{_BE}|[:=]|-+>?)",
    "Final Answer (C)": rf"\banswer(?=[ \t]*\n|[ \t]+{_LONE_LETTER})",
    "A: C": rf"(?:^|\n)[ \t]*A(?=:\s*{_LONE_LETTER}):",
    "Correct: C": r"(?:^|\n)[ \t]*correct:",
    "\u7b54\u6848\u662fC": r"\u7b54\u6848(?:\u5e94\u8be5?)?[\u662f\u4e3a:\s]*",
    "\u6545\u9009C": r"(?<!\u4e0d)\u9009(?!\u9879)[\u62e9\u662f:\s]*",
}
ANSWER = re.compile(_any_of(_ANSWERS), re.X | re.I)
"""Phrases that make the letter after them the answer, whatever follows."""

_SO_CUES = {
    "hence C": _words(
        "therefore | thus | hence | so | consequently | accordingly | finally | then | in conclusion"
    ),
    "that's C": rf"(?:it|that|this)(?:'s|\s+{_BE})",
    "which leaves C": _words("only | leaves | leaving us with | leaving | must be"),
    "I pick C": _words(
        "choose | chose | choosing | pick | picking | select | selecting | go with | going with | go for"
        "| going for | settle on | settle for | opt on | opt for | vote on | vote for"
    ),
    "I'd say C": r"i(?:'d|\s+would)?\s+(?:say|guess)",
    "this matches C": _words("match | matches | corresponds to"),
}
SO = re.compile(rf"\b{_any_of(_SO_CUES)}(?=[\s,:(])", re.X | re.I)
"""Phrases that make the letter after them the answer if nothing but a reason follows."""

_NAMED = r"""(?<![A-Za-z0-9'\-])[(\[]?
    (?P<upper>[A-Z]|(?<=(?:option|choice)[ ])[a-z])(?:[)\]]|(?=[\s.:,]))"""
_ASIDES = {
    "D (all of them) is correct": r"\s*\([^()\n]{1,60}\)",
    "B. New York is correct": r"""(?:[.:]|(?<=[)\]]))\s+
        (?!(?:is|would|must|seems|has|looks|appears)\b)[^.,;:\n]{1,60}?""",
    "C. is correct": r"[.:]",
}
_VERB = rf"(?i:{_BE}|seems(?:\s+to\s+be)?|appears(?:\s+to\s+be)?|looks)"
_STRESS = _words(
    "the | our | my | a | clearly | indeed | definitely | obviously | therefore | thus | actually | most"
    "| only | single | one | best | also"
)
_PRAISE = {
    "C is correct": "correct|right|best|answer",
    "C is the only option": r"(?<=only\s)(?:choice|option)",
    "C is the most likely answer": r"(?:appropriate|likely|accurate|plausible|suitable)\s+"
    r"(?:answer|choice|option)",
}
_UNLESS = r"(?![\w\-]|\s+(?:only|if|in|about|but|except|when|under|angle|triangle)\b)"
RIGHT = re.compile(
    rf"""{_NAMED}{_any_of(_ASIDES)}?
    (?:\s*\u662f?(?:\u6b63\u786e|\u5bf9)
    |\s+{_VERB}\s+(?i:{_STRESS}\s+)*(?i:{_any_of(_PRAISE)}{_UNLESS}))""",
    re.X,
)
"""A letter, and that it is right."""

_DOUBTS = {
    "I am not certain that the": r"\b(?:not|n't|never|cannot)\s+"
    + _words("think | believe | say | mean | true | certain | sure | likely | clear | claim | the case"),
    "I don't think the": r"n't\s+(?:think|believe|say|mean|claim)",
    "if": r"\b"
    + _words(
        "if | whether | unless | suppose | assume | assuming | doubt | say | claim | claims | while"
        "| although | though"
    ),
}
_LINK = r"""(?:\s+(?:that|why|how|whether|if))?(?:\s+(?:the|option|choice))?
    (?:\s+(?:correct|right|best|final))?[\s(]*$"""
_DENIAL = r"\b(?:not|never|n't)\s+(?:the\s+)?(?:\w+\s+)?$"
TAKEN_BACK = re.compile(rf"{_any_of(_DOUBTS)}{_LINK}|{_DENIAL}", re.X | re.I)
"""Right before a conclusion: it is none."""

_NAMED_SO = {
    "angle ": r"\b"
    + _words(
        "angle | point | vitamin | triangle | type | group | figure | line | statement | hepatitis | grade"
        "| set | matrix | event | variable | side | student | person | company | country | team"
    ),
    "A and ": r"(?<![A-Za-z0-9])[A-Za-z][)\]]?\s*(?:and|or|nor|&|/)",
}
NOT_A_CHOICE = re.compile(rf"{_any_of(_NAMED_SO)}\s*[(\[]?$", re.X | re.I)
"""Right before "C is right": that is about something else."""

# -------------------------------------------------------------------------
# Where nothing is concluded
# -------------------------------------------------------------------------

_MENTIONS = {
    "option C": rf"\b{_words('option | choice | answer | letter')}\s+",
    "it may be C": rf"\b{_words('could | may | might | can')}\s+be\s+",
}
MENTION = re.compile(rf"(?i:{_any_of(_MENTIONS)}){_FILLER}{_LETTER}", re.X)
"""A letter that a text speaks of as a choice."""
_FLAWS = {
    "is an": r"an?\b",
    "is too small": r"(?:too|not|out)\b",
    "isn't": "isn't|n't",
    "is incorrect": "in(?:correct|valid|accurate)|wrong|false|impossible|irrelevant|tempting|ruled"
    "|eliminated",
    "contradicts": r"ignores|fails|contradicts|doubles|does\s*n[o']t|cannot|can't",
    "is unlikely": r"is\s+un",
}
REJECTED = re.compile(
    rf"""\s*(?:(?:is|are|was|would\s+be|seems|looks)\s+)?(?:clearly\s+|also\s+|simply\s+)*{_any_of(_FLAWS)}""",
    re.X | re.I,
)
"""Text after a letter that rejects it."""
REJECTING = re.compile(
    r"\b(?:not|unlike|than|over|eliminates?|eliminating|out|excludes?|rejects?|against|without)\s+(?:the\s+)?$",
    re.I,
)
"""Right before such a letter: it is turned down, ``rather than the``."""

SENTENCE = re.compile(r"[.!?]\s+(?=[A-Z(])|\n")
"""The end of one."""
_LEADING_ENDS = {
    "(C) Paris": r"(?<=[)\]])",
    "C. Paris": "[).:]",
    "C": r"[ \t]*(?:\n|$)",
    "C - Paris": r"\s+-",
    "C because": rf",?\s+{_BECAUSE}",
}
LEADING = re.compile(
    rf"\s*(?i:(?:option|choice)\s+)?{_LETTER}{_any_of(_LEADING_ENDS)}"
    r"(?!\s*(?:is|are|was|seems|looks|can|cannot|would|could|may|might|has|does|says)\b)",
    re.X,
)
"""A letter as the mark of a choice."""
ALONE = re.compile(rf"\s*{_FILLER}{_LETTER}[.!?]?\s*$", re.X)
"""A letter and nothing else, ``Probably C.``"""
MARKED = re.compile(r"(?:^|[\n.!?;:])[ \t]*(?:(?:option|choice)\s+)?[(\[]?([A-Z])[)\].:](?![\w.])", re.I)
"""A letter that marks a choice anywhere in a text."""

FORMS: Mapping[re.Pattern[str], Mapping[str, str]] = {
    ANSWER: _ANSWERS,
    SO: _SO_CUES,
    RIGHT: _ASIDES | _PRAISE,
    TAKEN_BACK: _DOUBTS,
    NOT_A_CHOICE: _NAMED_SO,
    MENTION: _MENTIONS,
    REJECTED: _FLAWS,
    LEADING: _LEADING_ENDS,
}
"""The forms of the patterns that have several, by example."""
