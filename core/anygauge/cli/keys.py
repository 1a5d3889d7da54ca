"""``anygauge keys``: what can be written in a config."""

from __future__ import annotations

import argparse
import difflib
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anygauge.config.keys import Key

__all__ = ["HELP", "add_arguments", "print_keys", "run"]

HELP = "List config keys with type, choices, default and meaning, or print a JSON schema."

_OPTIONS = ("--help", "--json", "--schema")
_INDENT = " " * 6
_WIDTH = 100
_MARKS = ("-", "+")
"""How arguments of other projects begin."""
_NAMES = {"trl": "TRL"}
"""Projects whose name is not that of their table."""
_TITLE = 'In tables of the file, or as --section.key value. Values are TOML; "none" stands for null.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; arguments of other projects are words to look for."""
    parser.set_defaults(takes_any_word=True)
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="*",
        help="only keys that have all of these in their path, choices or meaning; `rollout.` lists a table. "
        "An argument of slime, verl or TRL, such as --n-samples-per-prompt, is answered with its key",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each key")
    parser.add_argument("--schema", action="store_true", help="print a JSON schema of config files")


def run(args: argparse.Namespace) -> int:
    """Print the keys."""
    from anygauge.config.keys import json_schema

    given = [word for word in args.words if word not in (*_OPTIONS, "--")]
    if args.schema and (given or args.json):
        args.parser.error("--schema is of all keys; leave out the words and --json")
    if args.schema:
        print(json.dumps(json_schema(), indent=2))
        return 0
    words = [*_without_values(given)]
    _check_options(args, words)
    return print_keys(words, as_json=args.json)


def _without_values(words: Sequence[str]) -> Iterator[str]:
    """Yield words without the values of arguments, as in ``--lr 1e-6`` and ``--lr=1e-6``."""
    has_value = False
    for word in words:
        is_argument = word.startswith(_MARKS)
        if is_argument or not has_value:
            yield word.partition("=")[0] or word
        has_value = is_argument and "=" not in word


def _check_options(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Exit with status 2 if a word is like an option of this command, as `--jsno` is."""
    for word in words:
        if close := difflib.get_close_matches(word, _OPTIONS, n=1, cutoff=0.75):
            args.parser.error(f"unrecognized arguments: {word} (did you mean {close[0]}?)")


def print_keys(words: Sequence[str], *, as_json: bool = False) -> int:
    """Print the keys that have all words, or that arguments of other projects stand for; return 1 without."""
    from anygauge.config.keys import config_keys
    from anygauge.config.validate import meant_foreign
    from anygauge.plugins import load_plugins

    keys = [key for key in config_keys(load_plugins()) if _matches(key, words)]
    if as_json:
        print(*(json.dumps(asdict(key)) for key in keys), sep="\n")
    elif keys:
        arguments = [word for word in words if word.startswith(_MARKS)]
        print(*_foreign(arguments), _TITLE, *(line for key in keys for line in _lines(key)), sep="\n")
    elif all(map(meant_foreign, words)):
        print(*_foreign(words), sep="\n")
        return 0
    else:
        print(
            f"No key has {' and '.join(words)} in its path, choices or meaning.", *_foreign(words), sep="\n"
        )
    return 0 if keys else 1


def _foreign(words: Sequence[str]) -> Iterator[str]:
    """Yield our keys for words that are arguments of other projects, or why there are none."""
    from anygauge.config.keys import config_keys
    from anygauge.config.validate import meant_key
    from anygauge.migrate.table import foreign_keys

    for word in words:
        keys = list(foreign_keys(word))
        for project, row in keys:
            argument = f"{word} of {_NAMES.get(project, project)}"
            yield f"  {argument}: {' and '.join(row.keys)} (docs/migrate/{project}.md)"
        is_ours = word.lstrip("-+") in {key.path for key in config_keys()}
        if not keys and not is_ours and (meant := meant_key(word)):
            yield f"  {word}: {meant}"


def _matches(key: Key, words: Sequence[str]) -> bool:
    text = " ".join((key.path, *key.choices, key.meaning)).lower()
    return all(
        key.path.startswith(word) if word.endswith(".") else word.lower().removeprefix("--") in text
        for word in words
    )


def _lines(key: Key) -> Iterator[str]:
    shown = "required" if key.default is None else f"default {key.default}"
    yield f"  --{key.path}  ({key.kind}; {shown})"
    yield from _wrapped(key.meaning)
    if key.choices:
        yield from _wrapped(f"Choices: {', '.join(key.choices)}.")
    yield f"{_INDENT}{key.page}"


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
