"""Arguments on a command line or in YAML, as several projects write them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from anygauge.migrate.shell import scalar
from anygauge.migrate.table import Input, Unresolved

__all__ = ["TRACKERS", "flat_yaml", "options", "whole"]

TRACKERS = ("wandb", "tensorboard", "trackio")
NO_SWITCH = re.compile(r"(?!)")
_ALL_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*].*\}|\$\{\w+\[[@*]\]\}")
"""Expansions that are several words; a single argument never has one as its value."""
Default = TypeVar("Default")


def options(
    words: Sequence[str | Unresolved],
    switches: re.Pattern[str] = NO_SWITCH,
    lists: Collection[str] = (),
) -> Input:
    """Return ``--key value ...`` by key: a switch is true, several values are a list.

    A word that the text does not tell is a note if no argument can take it as a value.

    :param switches: Names of arguments that take no value.
    :param lists: Names of arguments that take several values.

    >>> words = ["--lr", "1e-6", "--colocate", "--rollout-stop", "a", "b", "--seed=3"]
    >>> options(words).arguments
    {'lr': 1e-06, 'colocate': True, 'rollout-stop': ['a', 'b'], 'seed': 3}
    >>> options(["--lr", "1e-6", Unresolved("$EXTRA")]).arguments
    {'lr': 1e-06}
    """
    values: dict[str, list[Any]] = {}
    notes: list[str] = []
    name, is_complete = "", True
    for word in words:
        if isinstance(word, str) and word.startswith("--") and len(word) > 2:
            name, given, value = word[2:].partition("=")
            values[name] = [scalar(value)] if given else []
            is_complete = switches.fullmatch(name) is not None
        elif isinstance(word, Unresolved) and (
            ((is_complete or values[name]) and name not in lists) or _ALL_ARGUMENTS.fullmatch(word.text)
        ):
            notes.append(f"{word} is not known from the text; add its arguments to the command")
        elif name:
            values[name].append(scalar(word))
    return Input({name: _one(several) for name, several in values.items()}, tuple(notes))


def _one(values: list[Any]) -> Any:
    unresolved = next((each for each in values if isinstance(each, Unresolved)), None)
    if unresolved is not None:
        return unresolved
    return values if len(values) > 1 else (values[0] if values else True)


def flat_yaml(text: str) -> dict[str, Any]:
    """Return the leaves of a YAML config by dotted path, without nulls and values that refer to others.

    :raises ValueError: It is not YAML, not a mapping, or has anchors.
    """
    import yaml

    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise ValueError("it has YAML aliases, which can multiply")
        tree = yaml.safe_load(text)
        leaves = dict(_leaves(tree, "")) if isinstance(tree, dict) else {}
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"it is not YAML: {str(error).splitlines()[0]}") from error
    if not leaves:
        raise ValueError("it is not a YAML mapping with values")
    return leaves


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        elif (
            value not in (None, [], "???") and "${" not in str(value) and name not in ("_target_", "defaults")
        ):
            yield path, scalar(value) if isinstance(value, str) else value


def whole(given: Mapping[str, Any], name: str, default: Default) -> int | Default:
    """Return an argument that is a whole number, or a default.

    >>> whole({"n": 4}, "n", 1), whole({"n": True}, "n", 1), whole({}, "n", None)
    (4, 1, None)
    """
    value = given.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default
