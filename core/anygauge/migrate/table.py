"""Tables of the arguments of other projects, and the conversion of arguments by a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from anygauge.disk import parse_toml

__all__ = [
    "PROJECTS",
    "Imported",
    "Input",
    "Row",
    "Unresolved",
    "convert",
    "foreign_keys",
    "foreign_names",
    "rows",
]

PROJECTS = ("slime", "verl", "trl")
LONGEST_SHOWN = 80
DEEPEST = 16
"""Tables and lists in a value."""
_NAME = re.compile(r"\w[\w.-]{0,150}")


@dataclass(frozen=True, slots=True)
class Row:
    """An argument of another project, as a table ``PROJECT.toml`` beside this module has it."""

    name: str
    """A ``*`` at its end stands for the rest of a name, and in ``keys`` for the same with underscores."""
    keys: tuple[str, ...] = ()
    """Keys that take its value; none if there is no counterpart."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Our values by theirs, where these differ; others have no counterpart."""
    default: Any = None
    """Value that the other project takes if the argument is absent, where ours differs."""
    rule: str = ""
    """How the keys follow from this argument and others; the code of the project applies it."""
    note: str = ""
    """Why there is no counterpart, and what to do instead."""
    unneeded: str = ""
    """Why nothing has to be set."""

    @property
    def is_prefix(self) -> bool:
        """Whether it stands for several arguments."""
        return self.name.endswith("*")

    def keys_of(self, name: str) -> tuple[str, ...]:
        """Return the keys of an argument that the row stands for."""
        rest = name[len(self.name) - 1 :].replace("-", "_")
        return tuple(key.replace("*", rest) for key in self.keys)


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A value that a text alone does not tell."""

    text: str
    """As it is written there."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Input:
    """Arguments read from a script or config."""

    arguments: Mapping[str, Any]
    """Values by name; :class:`Unresolved` where the text does not tell one."""
    notes: tuple[str, ...] = ()
    """Notes on parts that the reader left out."""


@dataclass(slots=True)
class Imported:
    """A config in the making."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Values by dotted path."""
    converted: list[str] = field(default_factory=list)
    """Names of arguments with a counterpart."""
    unneeded: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    """Arguments without a counterpart, each with the reason or what to do instead."""
    unfinished: list[str] = field(default_factory=list)
    """Keys that only the user can complete, as lines of TOML outside of any table."""

    def put(self, key: str, value: Any) -> None:
        """Set a key, unless the value is ``None``, not known, or nothing that TOML can have."""
        if _is_plain(value):
            self.keys[key] = value

    def miss(self, name: str, why: str) -> None:
        """Record that an argument, or a part of its value, has no counterpart."""
        entry = (_short(name), why)
        if entry not in self.missing:  # a row of many arguments counts once
            self.missing.append(entry)


Rules = Callable[[Mapping[str, Any], Imported], None]
"""Sets the keys that several arguments decide together; gets arguments with defaults filled in."""


@cache
def rows(project: str) -> Mapping[str, Row]:
    """Return the rows of a project's table by name."""
    text = (Path(__file__).parent / f"{project}.toml").read_text(encoding="utf-8")
    return {name: _row(name, entry) for name, entry in parse_toml(text)["arguments"].items()}


def _row(name: str, entry: Mapping[str, Any]) -> Row:
    keys = entry.get("keys", ())
    others = {field: value for field, value in entry.items() if field != "keys"}
    return Row(name, tuple([keys] if isinstance(keys, str) else keys), **others)


def foreign_keys(name: str) -> Iterator[tuple[str, Row]]:
    """Yield the projects with an argument, and its row; ``name`` may be the last part of a dotted one."""
    wanted = name.lstrip("-+").replace("-", "_")
    for project in PROJECTS:
        table = rows(project)
        names = [wanted, *(each for each in table if each.rpartition(".")[2].replace("-", "_") == wanted)]
        row = next((table[each] for each in names if each in table and table[each].keys), None)
        if row is not None:
            yield project, row


@cache
def foreign_names() -> frozenset[str]:
    """Return the last parts of the names of arguments with a key here, with underscores."""
    table = (row for project in PROJECTS for row in rows(project).values())
    named = (row.name for row in table if row.keys and not row.is_prefix)
    return frozenset(name.rpartition(".")[2].replace("-", "_") for name in named)


def convert(project: str, source: Input, rules: Rules) -> Imported:
    """Return the config that the arguments of another project's script or config amount to.

    :raises ValueError: None of them is an argument of the project, or more of them are another's.
    """
    result, table = Imported(), rows(project)
    known = {
        each: sum(_row_of(rows(each), name) is not None for name in source.arguments) for each in PROJECTS
    }
    if not known[project]:
        raise ValueError(f"none of its arguments is in the table of {project}")
    most = max(PROJECTS, key=known.__getitem__)
    if known[most] > known[project]:
        raise ValueError(f"its arguments are those of {most}: `anygauge import {most} FILE`")
    for name, value in source.arguments.items():
        _convert(table, name, value, result)
    for name, row in table.items():
        if row.default is not None and not row.rule and name not in source.arguments:
            _put(row, name, row.default, result)
    rules(_with_defaults(table, source.arguments), result)
    for note in source.notes:
        result.miss("the file", note)
    return result


def _with_defaults(table: Mapping[str, Row], arguments: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: row.default for name, row in table.items() if row.default is not None}
    return defaults | {name: value for name, value in arguments.items() if value is not None}


def _convert(table: Mapping[str, Row], name: str, value: Any, result: Imported) -> None:
    """Apply the row of an argument; one with a rule is left to the rules of its project."""
    row = _row_of(table, name)
    keys = "" if row is None else ", ".join(row.keys_of(name))
    if row is None:
        result.miss(name, "not in the table of this project; look for a key with `anygauge keys WORD`")
    elif row.unneeded or (row.note and value is False):
        result.unneeded.append(name)
    elif not row.keys:
        result.miss(row.name, row.note)
    elif isinstance(value, Unresolved):
        result.miss(name, f"its value {_short(value)} is not known from the text; set {keys}")
    elif not _is_plain(value):
        result.miss(name, f"its value cannot be written in TOML; set {keys}")
    elif _put(row, name, value, result):
        result.converted.append(name)


def _is_plain(value: Any, depth: int = DEEPEST) -> bool:
    """Return whether TOML can have a value."""
    if isinstance(value, list | tuple | dict) and depth:
        below = value.values() if isinstance(value, dict) else value
        names = value if isinstance(value, dict) else ()
        return all(isinstance(name, str) for name in names) and all(
            _is_plain(each, depth - 1) for each in below
        )
    return isinstance(value, str | bool | int | float)


def _row_of(table: Mapping[str, Row], name: str) -> Row | None:
    if not _NAME.fullmatch(name):
        return None
    beginnings = (row for row in table.values() if row.is_prefix and name.startswith(row.name[:-1]))
    return table.get(name) or next(beginnings, None)


def _put(row: Row, name: str, value: Any, result: Imported) -> bool:
    """Set the keys of a row without a rule, and return whether the value has a counterpart."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if row.values and text not in row.values:
        known = ", ".join(row.values)
        result.miss(name, f"{_short(value)} has no counterpart (converted: {known}); see {row.keys[0]}")
        return False
    if not row.rule:
        for key in row.keys_of(name):
            result.put(key, row.values.get(text, value))
    return True


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
