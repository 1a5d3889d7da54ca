"""``--section.key value`` from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from anygauge.config.tree import Tree, put
from anygauge.disk import parse_toml
from anygauge_hooks.types import ConfigProblem

__all__ = ["read_overrides"]

_QUOTED = ("[", "{", '"', "'")


def read_overrides(overrides: Iterable[str | tuple[str, Any]]) -> tuple[Tree, list[ConfigProblem]]:
    """Return the config tree of command-line overrides, and their problems.

    :param overrides: ``"--section.key", "value"`` in a row, ``"--section.key=value"``,
        ``"section.key=value"`` or ``("section.key", value)``. A value is read as TOML; what is no TOML is a
        plain string.
    """
    tree: Tree = {}
    problems: list[ConfigProblem] = []
    for path, value in _pairs(overrides):
        if value is None:
            problems.append(ConfigProblem(path=path, found=None, hint=f"needs a value: --{path} VALUE"))
        elif path.startswith("on."):
            problems.append(_backend_table(path, value))
        else:
            parsed, problem = _parse(path, value)
            problems += [problem] if problem else []
            put(tree, path, parsed)
    return tree, problems


def _pairs(overrides: Iterable[str | tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    queue = list(overrides)
    while queue:
        item = queue.pop(0)
        if isinstance(item, tuple):
            yield item
            continue
        path, equals, value = item.removeprefix("--").partition("=")
        if equals:
            yield path, value
        elif queue and isinstance(queue[0], str) and not queue[0].startswith("--"):
            yield path, queue.pop(0)
        else:
            yield path, None


def _backend_table(path: str, value: Any) -> ConfigProblem:
    key = ".".join(path.split(".")[2:]) or "section.key"
    hint = f"the command line is for one backend already; write --{key} {value}"
    return ConfigProblem(path=path, found=value, hint=hint)


def _parse(path: str, value: Any) -> tuple[Any, ConfigProblem | None]:
    if not isinstance(value, str):
        return value, None
    try:
        tree = parse_toml(f"value = {value}")
    except ValueError as error:
        if not value.startswith(_QUOTED):
            return value, None
        hint = f'not valid TOML ({error}); quote it for the shell: --{path} \'["a", "b"]\''
        return value, ConfigProblem(path=path, found=value, hint=hint)
    parsed = tree["value"]
    plain = len(tree) == 1 and isinstance(parsed, bool | int | float | str | list | dict)
    return (parsed if plain else value), None
