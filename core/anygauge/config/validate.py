"""Validate a tree: return a :class:`Config`, or all of its problems."""

from __future__ import annotations

import copy
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from anygauge.config.schema import Config, DType
from anygauge.config.schema.section import NAME_PATTERN
from anygauge.config.suggestions import foreign_hint, misspelled, with_words
from anygauge.config.tree import Tree, merge, plain, remove
from anygauge_hooks.types import ConfigProblem

__all__ = [
    "NONE",
    "QUOTES",
    "Checked",
    "accepts_none",
    "as_written",
    "describe",
    "is_section",
    "keys",
    "meant_foreign",
    "meant_key",
    "plain_text",
    "problems_of",
    "sections",
    "validate",
]

NONE = "none"
"""TOML has no null: this string stands for it, in the fields that take one."""
QUOTES = "write it in quotes: "
"""Starts the hint to a string that was written as a number; the number in quotes follows."""

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Short names, which Megatron, SGLang and others take."""
HALF = ("fp16", "float16", "half")
FP8 = ("fp8", "float8", "float8_e4m3fn", "float8_e5m2")
USUAL = {
    **dict.fromkeys(("algorithm.name", "algorithm.type"), "algorithm.advantage"),
    **dict.fromkeys(("model.name", "model.name_or_path"), "model.path"),
    "checkpoint": "save",
    **dict.fromkeys(("data.path", "data.file", "data.files", "data.rows", "rows"), "data.train"),
}
"""Keys that people try first, in whose table no key has a similar name."""
_UNIONS = (typing.Union, types.UnionType)
_PLACEHOLDERS: Tree = {
    "run": {"name": "unnamed"},
    "model": {"path": "."},
    "data": {"train": ["."]},
}
"""Placeholders for required fields that are missing or wrong, so that the rest can still be checked."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A config, the problems of the tree it was read from, and the paths that stand in for those."""

    config: Config
    problems: tuple[ConfigProblem, ...]
    broken: frozenset[str]
    """Paths of sections and fields whose value is a default or placeholder because theirs was wrong."""


def validate(tree: Mapping[str, Any]) -> Checked:
    """Check a tree against the schema.

    Values keep their TOML types: a string is no number, a number no switch. A wrong value is replaced by its
    default, so that what depends on others can be checked in the same pass.
    """
    tree = as_written(tree)
    try:
        return Checked(_parse(tree), (), frozenset())
    except ValidationError as error:
        problems, details = problems_of(error), error.errors(include_url=False)
    broken = frozenset(".".join(str(part) for part in detail["loc"][:2]) for detail in details)
    return Checked(_parse(_repaired(tree, broken)), problems, broken)


def as_written(tree: Mapping[str, Any]) -> Tree:
    """Return a tree with null for ``"none"`` and full names of dtypes, where the schema takes these."""
    return {name: _as_written(table, _kind_below(Config, name)) for name, table in tree.items()}


def problems_of(error: ValidationError) -> tuple[ConfigProblem, ...]:
    """Return the problems that the schema found."""
    return tuple(_problem(detail) for detail in _merged(error.errors(include_url=False)))


def _merged(details: Iterable[ErrorDetails]) -> Iterable[ErrorDetails]:
    """Return one detail for each wrong value: where a key takes several kinds, pydantic has one of each."""
    merged: dict[tuple[int | str, ...], ErrorDetails] = {}
    for detail in details:
        loc = _without_kinds(detail["loc"])
        if loc in merged:
            merged[loc]["msg"] += f" or {detail['msg'].removeprefix('Input should be ')}"
        else:
            merged[loc] = detail
            detail["loc"] = loc
    return merged.values()


def _without_kinds(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a place without what pydantic adds: the name of one of the kinds that a key takes."""
    kind: Any = Config
    for length, part in enumerate(loc):
        if typing.get_origin(_bare(kind)) in _UNIONS:
            return loc[:length]
        kind = _kind_below(kind, part)
    return loc


def _parse(tree: Mapping[str, Any]) -> Config:
    # JSON because pydantic's strict mode takes lists for tuples and strings for paths from there only.
    return Config.model_validate_json(json.dumps(tree, default=str), strict=True)


def _repaired(tree: Tree, broken: frozenset[str]) -> Tree:
    repaired = copy.deepcopy(tree)
    for path in broken:
        remove(repaired, path)
    return merge(_PLACEHOLDERS, repaired)


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the name and the model of every section."""
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        yield name, field.annotation


def accepts_none(field: FieldInfo) -> bool:
    """Return whether a field takes ``None``."""
    origin = typing.get_origin(field.annotation)
    if origin not in _UNIONS:
        return False
    return types.NoneType in typing.get_args(field.annotation)


def _as_written(value: Any, kind: Any) -> Any:
    """Return a value as :func:`as_written`.

    :param kind: Type of the value in the schema.
    """
    if value == NONE and types.NoneType in typing.get_args(kind):
        return None
    if isinstance(value, str) and _bare(kind) == DType:
        return DTYPES.get(value, value)
    if isinstance(value, Mapping):
        return {key: _as_written(item, _kind_below(kind, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item, _kind_below(kind, number)) for number, item in enumerate(value)]
    return value


def _kind_below(kind: Any, key: int | str) -> Any:
    """Return what the schema says of an item of a table or list: a type, or ``Any`` where it says nothing."""
    kind = _bare(kind)
    arguments = typing.get_args(kind)
    if is_section(kind):
        field = kind.model_fields.get(str(key))
        return Any if field is None else field.annotation
    if typing.get_origin(kind) is dict:
        return arguments[1]
    return arguments[0] if typing.get_origin(kind) is tuple and isinstance(key, int) else Any


def _bare(kind: Any) -> Any:
    """Return a type without its constraints and without ``None``."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        return _bare(arguments[0])
    others = [each for each in arguments if each is not types.NoneType]
    return _bare(others[0]) if len(others) == 1 < len(arguments) else kind


def is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether a type of the schema is a table with keys of its own."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _problem(detail: ErrorDetails) -> ConfigProblem:
    path = _path(detail["loc"])
    if detail["type"] in ("missing", "too_long") and isinstance(detail["input"], list):
        hint = "must be two numbers"  # the only lists of a fixed length
        return ConfigProblem(path=plain(path), found=detail["input"], hint=hint)
    if detail["type"] == "missing":
        return ConfigProblem(path=path, found=None, hint=_missing_hint(detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return ConfigProblem(
            path=path, found=detail["input"], hint=_unknown_hint(detail["loc"], detail["input"])
        )
    return ConfigProblem(path=path, found=detail["input"], hint=_value_hint(detail))


def _path(loc: Sequence[int | str]) -> str:
    loc = loc[:-1] if loc[-1:] == ("[key]",) else loc  # pydantic's mark of a wrong key of a table
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _section(loc: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the model of the table at a place, if the schema has one for it."""
    kind: Any = Config
    for part in loc:
        kind = _kind_below(kind, part)
    kind = _bare(kind)
    return kind if is_section(kind) else None


def _field(loc: Sequence[int | str]) -> FieldInfo | None:
    """Return the field that holds what is at a place: of a list or an open table, the field of all of it."""
    for length in range(len(loc) - 1, 0, -1):
        section = _section(loc[:length])
        if section is not None:
            return section.model_fields.get(str(loc[length]))
    return None


def _missing_hint(loc: Sequence[int | str]) -> str:
    field, table = _field(loc), _section(loc)
    if field is not None:
        return f"required: {describe(field)}"
    assert table is not None
    needed = (key for key, field in table.model_fields.items() if field.is_required())
    return f"required table; it needs {', '.join(needed)}"


def meant_key(name: str) -> str:
    """Return which key a name without a table may stand for, as a clause; empty if there is none."""
    text = _unknown_hint((name,)).removeprefix("unknown key; ")
    return "" if text.startswith("known here") else text


def meant_foreign(name: str) -> str:
    """Return our keys for an argument of another project, as a clause; empty if it is none."""
    return "" if name in dict(keys()) else foreign_hint(name)


def _unknown_hint(loc: Sequence[int | str], given: Any = None) -> str:
    name, table = str(loc[-1]), _section(loc[:-1])
    assert table is not None
    if usual := USUAL.get(_path(loc)):
        return f"unknown key; did you mean {usual}?"
    known = table.model_fields
    elsewhere = [f"{section}.{name}" for section, model in sections() if name in model.model_fields]
    if not elsewhere and (hint := foreign_hint(name, given)):
        return f"unknown key; {hint}"
    close = [_path([*loc[:-1], key]) for key in difflib.get_close_matches(name, known, n=3)]
    candidates = [*elsewhere, *(path for path in close if path not in elsewhere)]
    candidates = candidates or misspelled(name)
    candidates = candidates or [_path([*loc[:-1], key]) for key in with_words(name, known)]
    if candidates:
        return f"unknown key; did you mean {' or '.join(candidates)}?"
    return f"unknown key; known here: {', '.join(known)}"


def _value_hint(detail: ErrorDetails) -> str:
    text = detail["msg"].replace("Input should", "must").replace("String should", "must")
    field = _field(detail["loc"])
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        text += f'; {QUOTES}"{json.dumps(detail["input"])}"'
    if detail["type"] == "tuple_type":
        text += f": {_as_list(detail['input'])}"
    if detail["type"] == "string_pattern_mismatch" and detail["ctx"]["pattern"] == NAME_PATTERN:
        text = "must begin with a letter or a digit, and have only letters, digits, '.', '_' and '-'"
    if detail["type"] in ("bool_parsing", "bool_type"):
        text = "must be true or false"
    if field is not None and accepts_none(field):
        text += f', or "{NONE}"'
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        text += _choice_hint(detail["input"], detail["ctx"]["expected"])
    return text.replace("must be an object", "must be a table")


def _choice_hint(given: str, choices: str) -> str:
    """Return what was meant by a value that is none of the choices, as pydantic lists them."""
    if given in HALF:
        return "; float16 is not supported, and bfloat16 has the same size"
    if given in FP8:
        return "; `anygauge convert --to-bfloat16 DIR OUT` writes a checkpoint in FP8 as bfloat16"
    known = re.findall(r"'([^']+)'", choices)
    close = difflib.get_close_matches(given, known, n=1) or with_words(given, known)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _as_list(value: Any) -> str:
    """Return the array that a value was to be: ``0.9,0.99`` is two numbers."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else []
    try:
        numbers = [json.loads(part) for part in parts]
    except ValueError:
        numbers = []
    return json.dumps(numbers or [value], default=str)


def describe(field: FieldInfo) -> str:
    """Return a field's documentation as plain text, with null as the user must write it."""
    return plain_text(field.description or "")


def plain_text(text: str) -> str:
    """Return a docstring in one line without markup, and null as the user must write it."""
    return " ".join(text.split()).replace("``None``", f'"{NONE}"').replace("``", "")


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted path and the field of every key of the schema."""
    for name, section in sections():
        for key, field in section.model_fields.items():
            yield f"{name}.{key}", field
