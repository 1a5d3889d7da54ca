"""Suggestions for unknown names: arguments of other projects, and names that have one as a part."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from anygauge.config.tree import flatten
from anygauge.migrate.table import PROJECTS, foreign_keys, foreign_names, rows

__all__ = ["foreign_hint", "misspelled", "with_words"]


def foreign_hint(name: str, given: Any = None) -> str:
    """Return the keys that an argument of another project has here, if it is one.

    :param given: Its value: a table, if it is the first part of a dotted name.
    """
    if any(path.startswith(f"{name}.") for path in rows("verl")):
        below = list(flatten({name: given})) if isinstance(given, Mapping) else []
        if len(below) == 1 and (hint := foreign_hint(below[0])):
            return hint
        return "a table of verl: `anygauge import verl FILE` converts its scripts and configs"
    return _meaning(name)


@cache  # each of many rows may have the key
def _meaning(name: str) -> str:
    pages: dict[str, list[str]] = {}
    for project, row in foreign_keys(name):
        pages.setdefault(" and ".join(row.keys), []).append(f"docs/migrate/{project}.md")
    meanings = (f"{keys} ({' and '.join(names)})" for keys, names in pages.items())
    if pages:
        return f"write {' or '.join(meanings)}"
    notes = [row.note for project in PROJECTS for row in [rows(project).get(name)] if row and row.note]
    return notes[0] if notes else ""


def misspelled(name: str) -> list[str]:
    """Return the keys of an argument of another project whose name is like that one."""
    close = difflib.get_close_matches(name, foreign_names(), n=1, cutoff=0.8)
    return list(dict.fromkeys(key for each in close for _, row in foreign_keys(each) for key in row.keys))


def with_words(name: str, known: Iterable[str], most: int = 4) -> list[str]:
    """Return the known names that contain all words of a name, as ``policy_kl`` contains ``kl``.

    :param most: Nothing is returned if there are more, which would not help.
    """
    words = set(name.split("_"))
    found = [each for each in known if words <= set(each.split("_"))]
    return found if len(found) <= most else []
