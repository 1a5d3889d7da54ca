"""Nested tables addressed by dotted paths: ``{"train": {"lr": 1.0}}`` is ``train.lr``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["Tree", "covers", "flatten", "is_inside", "merge", "plain", "put", "remove"]

Tree = dict[str, Any]


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Return ``base`` with ``over`` laid over it: tables merge, anything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every leaf by dotted path; an empty table is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{path}.")
        else:
            leaves[path] = value
    return leaves


def put(tree: Tree, path: str, value: Any) -> None:
    """Set the leaf at ``path``, in place, making the tables on the way. A name with dots is quoted in it."""
    *tables, last = _names(path)
    for table in tables:
        below = tree.get(table)
        if not isinstance(below, dict):
            below = tree[table] = {}
        tree = below
    tree[last] = value


def _names(path: str) -> list[str]:
    """Return the keys of a path: ``filter_options."package.module:function".least`` has three."""
    if '"' not in path:
        return path.split(".")
    keys = re.split(r"""\.(?=(?:[^"]*"[^"]*")*[^"]*$)""", path)
    return [key[1:-1] if key[0:1] == key[-1:] == '"' else key for key in keys]


def remove(tree: Tree, path: str) -> None:
    """Delete what is at ``path``, in place, if anything is."""
    *tables, last = _names(path)
    for table in tables:
        tree = tree.get(table, {})
    tree.pop(last, None)


def covers(path: str, other: str) -> bool:
    """Return whether two dotted paths are equal, or one is a table that contains the other."""
    return is_inside(path, [other]) or is_inside(other, [path])


def plain(path: str) -> str:
    """Return the path of the key that holds a list's item: ``data.train`` for ``data.train[0]``."""
    return re.sub(r"\[\d+\]", "", path)


def is_inside(name: str, others: Collection[str]) -> bool:
    """Return whether a dotted name is one of the others, or within one of them: of keys, or of modules."""
    return any(name == other or name.startswith(f"{other}.") for other in others)
