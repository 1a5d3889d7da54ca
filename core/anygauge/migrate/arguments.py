"""Arguments on a command line or in YAML, as several projects write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from anygauge.migrate.shell import scalar
from anygauge.migrate.table import Input, Unresolved

__all__ = ["TRACKERS", "added_note", "flat_yaml", "options", "whole"]

TRACKERS = ("wandb", "tensorboard", "trackio")
NO_NAME = re.compile(r"(?!)")
_POSITIONAL = re.compile(r"\$[@*]|\$\{[@*].*\}")
_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")
Default = TypeVar("Default")


def options(
    words: Sequence[str | Unresolved],
    switches: re.Pattern[str] = NO_NAME,
    lists: re.Pattern[str] = NO_NAME,
) -> Input:
    """Return ``--key value ...`` by key: a switch is true, several values are a list.

    An argument is unresolved if a word that the text does not tell is, or may be, among its values. Such a
    word is a note if it may add arguments instead.

    :param switches: Names of arguments that take no value.
    :param lists: Names of arguments that take several values.

    >>> words = ["--lr", "1e-6", "--colocate", "--rollout-stop", "a", "b", "--seed=3"]
    >>> options(words).arguments
    {'lr': 1e-06, 'colocate': True, 'rollout-stop': ['a', 'b'], 'seed': 3}
    >>> options(["--lr", "1e-6", Unresolved("$EXTRA")]).arguments
    {'lr': 1e-06}
    >>> options(["--sizes", "1", "2", Unresolved("$(...)")]).arguments
    {'sizes': Unresolved(text='$(...)')}
    """
    values: dict[str, list[Any]] = {}
    notes: list[str] = []
    name, skipped = "", list[Unresolved]()
    for word in words:
        if isinstance(word, str) and word.startswith("--") and len(word) > 2:
            name, given, value = word[2:].partition("=")
            values[name], skipped = [scalar(value)] if given else [], []
            continue
        is_value = isinstance(word, str) or _takes(name, values.get(name, []), word, switches, lists)
        if isinstance(word, Unresolved) and (not is_value or _ARRAY.fullmatch(word.text)):
            notes.append(added_note(word, name))
            skipped.append(word)
        if is_value and name:  # skipped words are within its values
            values[name] += [*skipped, scalar(word)]
    return Input({name: _one(several) for name, several in values.items()}, tuple(notes))


def _takes(
    name: str, before: Sequence[Any], word: Unresolved, switches: re.Pattern[str], lists: re.Pattern[str]
) -> bool:
    """Return whether an argument takes an unresolved word as a value, after the values before it."""
    is_list = lists.fullmatch(name) is not None
    is_positional = _POSITIONAL.fullmatch(word.text) is not None
    if before:  # a second value, unless it is of a list, would rather be more arguments
        return not is_positional and (is_list or len(before) > 1)
    is_several = is_positional or _ARRAY.fullmatch(word.text) is not None
    return is_list or (name != "" and not is_several and not switches.fullmatch(name))


def added_note(word: Unresolved, name: str = "") -> str:
    """Return the note on an unresolved word that may add arguments, after the argument of a name."""
    place = f" after --{name}" if name else ""
    return f"{word}{place} is not known from the text; add its arguments to the command"


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
