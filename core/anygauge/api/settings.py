"""Config trees from Python values: nested tables, dotted names, and functions in place of their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.schema import Section
from anygauge.config.tree import Tree, covers, flatten, merge, put
from anygauge_hooks.errors import ConfigError

if TYPE_CHECKING:
    from anygauge.api.run_view import RunView

__all__ = ["free_name", "is_config_file", "model_tree", "tree_of"]

EXPORT = re.compile(r"hf(-step-\d+)?")
"""Name of the directory of an export in that of its run."""
NameFunction = Callable[[str, Callable[..., Any]], str]
"""Returns the name that stands in the config for a function, from its key and itself."""


def tree_of(values: Mapping[str, Any], name_function: NameFunction) -> Tree:
    """Return a config tree of Python values.

    :param values: Tables by section, ``{"train": {"lr": 1e-5}}``, and values by dotted name,
        ``{"train.lr": 1e-5}``.
    :raises ConfigError: A key is given twice, or beside a value in place of its table.

    >>> tree_of({"train": {"lr": 1e-5}, "train.dtype": "float32"}, lambda key, function: "")
    {'train': {'lr': 1e-05, 'dtype': 'float32'}}
    """
    tree: Tree = {}
    for key, value in values.items():
        below: Tree = {}
        put(below, key, _plain(value, key, name_function))
        _check_once(tree, below)
        tree = merge(tree, below)
    return tree


def _check_once(tree: Tree, more: Tree) -> None:
    """Refuse a key that both trees have: the later value would silently replace the other."""
    given, added = ([key for key, value in flatten(each).items() if value != {}] for each in (tree, more))
    for other, key in product(given, added):
        if other == key:
            raise ConfigError(f"{key} is given twice.", hint="Give it in its table or by its dotted name.")
        if covers(other, key):
            table = min(other, key, key=len)
            raise ConfigError(
                f"{other} and {key} are both given, and only one of them can hold.",
                hint=f"Write {table}={{...}} with its keys, or dotted names alone.",
            )


def _plain(value: Any, key: str, name_function: NameFunction) -> Any:
    """Return a value as TOML and JSON have it."""
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(name): _plain(each, f"{key}.{name}", name_function) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, key, name_function) for each in value]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return name_function(key, value)
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def is_config_file(source: object) -> bool:
    """Return whether a source is the path of a TOML file."""
    return isinstance(source, str | Path) and str(source).endswith(".toml")


def model_tree(source: str | Path | RunView) -> Tree:
    """Return the tree of a model alone."""
    path = source if isinstance(source, str | Path) else source.model
    return {"model": {"path": str(path)}}


def free_name(directory: Path, model: str) -> str:
    """Return the name of a new run: that of the model with the next free number.

    A model that another run exported counts as the model of that run: ``tiny-1/hf`` is ``tiny``.
    """
    path = Path(model)
    name = re.sub(r"-\d+$", "", path.parent.name) if EXPORT.fullmatch(path.name) else path.name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-") or "run"
    number = 1
    while (directory / f"{stem}-{number}").exists():
        number += 1
    return f"{stem}-{number}"
