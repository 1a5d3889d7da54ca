"""Words of a shell script, with simple variables expanded. Nothing is executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from anygauge.migrate.table import Unresolved

__all__ = ["Words", "commands", "scalar"]

Words = list[str | Unresolved]
"""A command or an array: words, unresolved where one depends on what only a run knows."""

LONGEST_WORD = 65_536
MOST_WORDS = 20_000
MOST_NUMBERS = 4096
"""Numbers of one ``$(seq ...)``."""
SEQUENCE = r"\$\([ \t]*seq(?:[ \t]+-?\d{1,9}){1,3}[ \t]*\)"
_PIECES = re.compile(
    r"(?P<space>[ \t\r]+)|(?P<joined>\\\n)|(?P<end>\n|;|&&|\|\|?|&(?!>))|(?P<comment>(?<![^\s;&|(])#[^\n]*)"
    r"|(?P<single>'[^']*')|(?P<double>\"(?:[^\"\\]|\\.)*\")|(?P<escaped>\\.)"
    r"|(?P<sum>\$\(\((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*\)\))"
    rf"|(?P<sequence>(?<![^\s(]){SEQUENCE}(?![^\s;&|)\\]))"
    r"|(?P<open>\$?\()|(?P<close>\))|(?P<tick>`[^`]*`)"
    r"|(?P<plain>\$\{[^{}\n]*(?:\{[^{}\n]*\}[^{}\n]*)*\}|[^\s'\"\\;&|()`$]+|.)",
    re.S,
)
_VARIABLE = re.compile(
    r"\$\{(?P<array>\w+)\[[@*]\]\}|\$\{(?P<name>\w+)(?P<default>:?-[^{}]*(?:\{[^{}]*\}[^{}]*)*)?\}"
    r"|\$(?P<bare>[A-Za-z_]\w*)|\$\(\((?P<sum>.*?)\)\)|\$(?P<other>\{[^{}]*\}|[@*#?$!\d-])"
    r"|(?P<output>\$\((?:[^()]|\([^()]*\))*\)|\$\(|`[^`]*`?)",
    re.S,
)
_ARRAY = re.compile(r"(\w+)(\+?)=")
_ASSIGNMENT = re.compile(r"(?:export |local |readonly |declare )?(\w+)(\+?)=(.*)", re.S)
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LARGEST = 2**63
_LISTS = ("for", "select", "case")
_OPENING = ("if", "while", "until", *_LISTS)
_BETWEEN = ("then", "elif", "else", "do", "!")
_CLOSING = ("fi", "done", "esac")


def commands(text: str) -> Iterator[Words]:
    """Yield the commands of a script, and its arrays, each as its words; arrays in them are expanded.

    Assignments count in the order of the text. Loops and branches are not followed: a variable that is
    assigned in one is unresolved; one that is appended to keeps its words, with an unresolved one among them.

    :raises ValueError: An expansion is too long.
    """
    variables: dict[str, str | Unresolved] = {"HOME": str(Path.home())}
    arrays: dict[str, Words] = {}
    depth = total = 0
    for name, added, statement in _statements(text):
        depth, variable, raw = _unnested(depth, statement)
        if variable:
            variables[variable] = Unresolved(f"${variable}")
        expanded = (word for each in raw for word in _expanded(each, variables, arrays))
        words = list(islice(expanded, MOST_WORDS + 1))
        if name:
            before = arrays.get(name, ()) if added else ()
            words = arrays[name] = [*before, *([Unresolved(f"${{{name}[@]}}")] if depth else words)]
        elif (assigned := _assigned(raw)) is not None:
            variables[assigned[0]] = _new_value(*assigned, variables, is_sure=not depth)
            continue
        total += len(words)
        if len(words) > MOST_WORDS or total > 10 * MOST_WORDS:
            raise ValueError(
                f"a command expands to more than {MOST_WORDS} words, or all to ten times as many"
            )
        if words:
            yield words


def scalar(text: str | Unresolved) -> Any:
    """Parse a word as a number, boolean or null; return any other word unchanged.

    >>> scalar("8"), scalar("1e-6"), scalar("True"), scalar("null"), scalar("prompt")
    (8, 1e-06, True, None, 'prompt')
    """
    if isinstance(text, Unresolved):
        return text
    named = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d{1,40}\.?\d{0,40}|\.\d{1,40})([eE][+-]?\d{1,3})?", text):
        return float(text)
    return text


# -------------------------------------------------------------------------
# Statements
# -------------------------------------------------------------------------


def _statements(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Yield statements: the name of an array or nothing, whether it is appended to, and the words."""
    words, word, array, added, depth = list[str](), "", "", False, 0
    for match in _PIECES.finditer(f"{text}\n"):
        kind, piece = str(match.lastgroup), match[0]
        if depth:  # within $(...), whose output only a run knows
            depth += (kind == "open") - (kind == "close")
        elif kind == "open" and piece == "(" and not array and (made := _ARRAY.fullmatch(word)):
            array, added, word = made[1], bool(made[2]), ""
        elif kind == "open":
            depth, word = 1, f"{word}$(...)"
        elif kind not in ("space", "joined", "comment", "end", "close"):
            word += "$(...)" if kind == "tick" else piece
        else:
            words += [word] if word else []
            word = ""
            if kind == "close" or (kind == "end" and not array):
                if words or array:
                    yield array, added, words
                words, array = [], ""


def _unnested(depth: int, words: list[str]) -> tuple[int, str, list[str]]:
    """Return the depth of loops and branches, the variable of a loop, and a statement without their words."""
    if words and words[-1].endswith(":"):  # of Python in a here-document, which has no fi and no done
        return depth, "", words
    for at, word in enumerate(words):
        depth = max(0, depth + (word in _OPENING) - (word in _CLOSING))
        if word in _LISTS:  # the rest is no command: a variable and words, or a word and patterns
            return depth, "" if word == "case" else "".join(words[at + 1 : at + 2]), []
        if word not in (*_OPENING, *_CLOSING, *_BETWEEN):
            return depth, "", words[at:]
    return depth, "", []


def _assigned(words: Sequence[str]) -> tuple[str, bool, str] | None:
    """Return an assignment to a variable: its name, whether it is appended to, and the raw value."""
    if len(words) == 2 and words[0] in ("export", "local", "readonly", "declare"):
        words = words[1:]
    match = _ASSIGNMENT.fullmatch(words[0]) if len(words) == 1 else None
    return None if match is None else (match[1], bool(match[2]), match[3])


def _new_value(
    name: str, appended: bool, raw: str, variables: Mapping[str, str | Unresolved], *, is_sure: bool
) -> str | Unresolved:
    """Return the value of a variable after an assignment, which counts for sure outside of branches alone."""
    before = variables.get(name, "") if appended else ""
    space = " " if raw.lstrip("\"'").startswith(" ") else ""  # without one, the last word goes on
    value = _joined(raw, variables) if is_sure else Unresolved(f"{space}${name}")
    text = f"{before}{value}"
    if len(text) > LONGEST_WORD:
        raise ValueError(f"a word expands to more than {LONGEST_WORD} characters")
    return Unresolved(text) if isinstance(value, Unresolved) or isinstance(before, Unresolved) else text


# -------------------------------------------------------------------------
# Expansion
# -------------------------------------------------------------------------


def _expanded(raw: str, variables: Mapping[str, str | Unresolved], arrays: Mapping[str, Words]) -> Words:
    """Return the words that one becomes: several if it is an array."""
    match = _VARIABLE.fullmatch(raw.strip('"'))
    if match is not None and match["array"]:
        return list(arrays.get(match["array"], ()))
    if numbers := _sequence(raw):
        return numbers
    value = _joined(raw, variables)
    name = match and (match["name"] or match["bare"])
    if not name or raw.startswith('"'):
        return [value]
    if isinstance(value, str):
        return list(value.split())  # as the shell splits a variable without quotes
    words = str(variables.get(name, "")).split()
    if len(words) < 2:
        return [value]
    return [Unresolved(word) if "$" in word else word for word in words]


def _sequence(raw: str) -> Words:
    """Return the whole numbers that ``$(seq ...)`` prints; none if there are too many, or it is none."""
    if re.fullmatch(SEQUENCE, raw) is None:
        return []
    *before, last = map(int, re.findall(r"-?\d+", raw))
    first, step = before[0] if before else 1, before[1] if before[1:] else 1
    numbers = range(first, last + (1 if step > 0 else -1), step) if step else ()
    return [str(number) for number in numbers] if len(numbers) <= MOST_NUMBERS else []


def _joined(raw: str, variables: Mapping[str, str | Unresolved]) -> str | Unresolved:
    """Return a word without its quotes and with its variables expanded."""
    text, unresolved = "", False
    for part in re.findall(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^'\"\\]+|.", raw, re.S):
        value: str | Unresolved = part[1:-1] if part[0] == "'" and len(part) > 1 else ""
        if part[0] == '"' and len(part) > 1:
            inner = _substituted(part[1:-1], variables)
            value = inner if isinstance(inner, Unresolved) else re.sub(r"\\([\"\\$`])", r"\1", inner)
        elif part[0] == "\\":
            value = part[1:]
        elif part[0] != "'":
            value = _substituted(part, variables)
        unresolved |= isinstance(value, Unresolved)
        text += str(value)
        if len(text) > LONGEST_WORD:
            raise ValueError(f"a word expands to more than {LONGEST_WORD} characters")
    return Unresolved(text) if unresolved else text


def _substituted(text: str, variables: Mapping[str, str | Unresolved]) -> str | Unresolved:
    """Return a text with its variables expanded, as far as the script sets them."""
    unresolved = False

    def value(match: re.Match[str]) -> str:
        nonlocal unresolved
        result = _value(match, variables)
        unresolved |= isinstance(result, Unresolved)
        return str(result)

    expanded = _VARIABLE.sub(value, text)
    return Unresolved(expanded) if unresolved else expanded


def _value(match: re.Match[str], variables: Mapping[str, str | Unresolved]) -> str | Unresolved:
    name = match["name"] or match["bare"]
    unknown = Unresolved("$(...)" if match["output"] else "".join(match[0].split()))  # spaces would split it
    if match["sum"] is not None:
        return _sum(match["sum"], variables) or unknown
    if name and isinstance(known := variables.get(name), str) and known:
        return known
    if match["default"] and name not in variables:
        return _substituted(match["default"].removeprefix(":")[1:].strip("\"'"), variables)
    return unknown


def _sum(text: str, variables: Mapping[str, str | Unresolved]) -> str | None:
    """Return an arithmetic expansion of whole numbers, if it is one."""
    try:
        tree = ast.parse(text.replace("$", "").replace("{", "").replace("}", "").strip(), mode="eval")
        return str(_number(tree.body, variables))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.AST, variables: Mapping[str, str | Unresolved]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(str(variables.get(node.id)))
    if isinstance(node, ast.BinOp) and (apply := _SUMS.get(type(node.op))) is not None:
        number = apply(_number(node.left, variables), _number(node.right, variables))
        if abs(number) < LARGEST:
            return number
    raise ValueError("not a sum of whole numbers")
