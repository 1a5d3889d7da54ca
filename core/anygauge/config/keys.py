"""Config keys as text: type, choices, default and meaning of each, at any depth, and a JSON schema."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from anygauge.config.check import NAMES
from anygauge.config.schema import Config
from anygauge.config.validate import NONE, describe, is_section, plain_text, sections
from anygauge.plugins import Plugins

__all__ = ["PAGES", "Key", "config_keys", "json_schema"]

NAMED: Mapping[str, str] = {
    **dict(NAMES),
    "rollout.filters": "register_sample_filters",
    "rollout.function": "register_rollout_functions",
    "reward.function": "register_reward_functions",
}
"""Keys whose values plugins register, and the hook."""
EVAL, PART = "eval.datasets.NAME.", "reward.parts.NAME."
"""Tables whose keys are those of another table."""
PAGES: Mapping[str, str] = {
    "run": "checkpoints",
    "run.task": "data",
    "run.report": "report",
    "run.progress": "report",
    "run.log_every": "report",
    "run.timeout_s": "debugging",
    "run.stop_on": "health",
    "run.trackers": "metrics",
    "run.metrics": "metrics",
    "run.tracker_options": "metrics",
    "run.deterministic": "determinism",
    "model": "models",
    "data": "data",
    "media": "media",
    "reward": "rewards",
    "hub": "names",
    "reference": "algorithms",
    "rollout": "rollout",
    "rollout.client": "serving",
    "rollout.gateway": "agents",
    "rollout.groups": "sglang",
    "rollout.sglang": "sglang",
    "algorithm": "algorithms",
    "train": "parallel",
    "train.engine": "fsdp",
    "train.lr": "algorithms",
    "train.provider": "hooks",
    "train.freeze": "models",
    "train.fused_loss": "loss",
    "train.loss_memory_gib": "loss",
    "train.prefix_packing": "batching",
    "train.lora": "lora",
    "train.micro_batch_tokens": "batching",
    "train.optimizer_steps": "batching",
    "train.global_batch_size": "batching",
    "teacher": "algorithms",
    "critic": "algorithms",
    "eval": "rollout",
    "health": "health",
    "profile": "profiling",
    "save": "checkpoints",
    "debug": "debugging",
    "placement": "clusters",
    "placement.colocated": "colocation",
    "placement.offload": "colocation",
    "cluster": "clusters",
    "weight_sync": "weight_sync",
}
"""Page of ``docs/`` on a table or a key; the longest beginning of a path counts."""
_SCALARS = {bool: "true or false", int: "integer", float: "number", str: "string", Path: "path", Any: "any"}


@dataclass(frozen=True, slots=True)
class Key:
    """A config key."""

    path: str
    """With ``NAME`` for a name of your own and ``[]`` for an item of a list: ``eval.datasets.NAME.top_p``."""
    kind: str
    """Type and bounds in words."""
    choices: tuple[str, ...]
    """Possible values, or registered names; a function of one's own may be named as well."""
    default: str | None
    """As TOML; ``None`` if the key is required."""
    meaning: str
    page: str
    """Page of the documentation, such as ``docs/rollout.md``."""


def config_keys(plugins: Plugins | None = None) -> Iterator[Key]:
    """Yield every key, those of tables within tables too.

    :param plugins: Plugins whose registered names are choices; ``None`` leaves these out.
    """
    for path, field in _fields(Config, ""):
        hook = NAMED.get(path.removeprefix(EVAL).replace(PART, "reward."))
        names = sorted(plugins.named(hook)) if plugins is not None and hook is not None else ()
        default = field.get_default(call_default_factory=True, validated_data={})
        yield Key(
            path=path,
            kind=_kind(field.annotation, field.metadata),
            choices=tuple(names) or tuple(_choices(field.annotation)),
            default=None if field.is_required() else _toml(default),
            meaning=describe(field),
            page=f"docs/{_longest(path)}.md",
        )


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of config files, for the completion and the checks of an editor.

    It takes what a file may have beside the keys themselves: ``"none"`` for null, a path alone where a table
    holds one, and tables of keys for one backend (``[on.NAME]``).
    """
    schema: dict[str, Any] = _in_toml(Config.model_json_schema())
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "anygauge config"
    tables = schema["properties"]
    one_backend = {"type": "object", "properties": dict(tables), "additionalProperties": False}
    tables["on"] = {
        "type": "object",
        "description": "Keys for one backend, by its name.",
        "additionalProperties": one_backend,
    }
    for table in (schema, *(schema["$defs"][kind.__name__] for _, kind in sections())):
        table.pop("required", None)  # the command line may have the key
    return schema


# -------------------------------------------------------------------------
# Fields
# -------------------------------------------------------------------------


def _fields(table: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the path and the field of each key of a table; those of a table in it instead of the table."""
    for name, field in table.model_fields.items():
        path = f"{prefix}{name}"
        inner = [(f"{path}{step}.", kind) for step, kind in _tables(field.annotation)]
        if not any(below == f"{path}." for below, _ in inner):
            yield path, field
        for below, kind in inner:
            yield from _fields(kind, below)


def _tables(kind: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the tables that a value may have, and the step to them: nothing, ``.NAME`` or ``[]``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_section(kind):
        yield "", kind
    elif origin is Annotated:
        yield from _tables(arguments[0])
    elif _is_union(kind):
        for each in arguments:
            yield from _tables(each)
    elif origin in (dict, list, tuple):
        step = ".NAME" if origin is dict else "[]"
        inner = arguments[1] if origin is dict else arguments[0]
        yield from ((f"{step}{below}", table) for below, table in _tables(inner))


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


# -------------------------------------------------------------------------
# Words
# -------------------------------------------------------------------------


def _kind(kind: Any, limits: Sequence[Any] = ()) -> str:
    """Return a type and its bounds in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    bounds = "".join(f", {text}" for text in map(_bound, limits) if text)
    if origin is Annotated:
        return _kind(arguments[0], arguments[1:])
    if _is_union(kind):
        kinds = dict.fromkeys(_kind(each, limits) for each in arguments if each is not types.NoneType)
        return " or ".join([*kinds, *([f'"{NONE}"'] if types.NoneType in arguments else [])])
    if origin is Literal:
        return "string" if all(isinstance(each, str) for each in arguments) else "one of the choices"
    if origin is tuple and Ellipsis not in arguments:
        return f"list of {len(arguments)}: {', '.join(map(_kind, arguments))}"
    if origin in (tuple, list):
        return f"list of {_plural(_kind(arguments[0]))}{bounds}"
    if origin is dict or kind is dict or is_section(kind):
        return f"table{bounds}"
    return f"{_SCALARS.get(kind, str(getattr(kind, '__name__', kind)))}{bounds}"


def _plural(kind: str) -> str:
    word, comma, bounds = kind.partition(",")
    return f"{word}s{comma}{bounds}"


def _bound(limit: Any) -> str:
    """Return a bound in words; nothing for what is no bound."""
    if isinstance(limit, FieldInfo):
        return ", ".join(filter(None, map(_bound, limit.metadata)))
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        if (value := getattr(limit, name, None)) is not None:
            return f"{sign} {value}"
    return "not empty" if getattr(limit, "min_length", None) else ""


def _choices(kind: Any) -> Iterator[str]:
    """Yield the values of a literal, where a type has one."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        yield from map(str, arguments)
    elif typing.get_origin(kind) is not dict:
        for each in arguments[:1] if typing.get_origin(kind) is Annotated else arguments:
            yield from _choices(each)


def _toml(value: Any) -> str:
    """Return a default as TOML, which for these values is JSON."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    return json.dumps(NONE if value is None else value, default=str)


def _longest(path: str) -> str:
    """Return the page of a key."""
    parts = path.replace("[]", "").split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(PAGES[each] for each in beginnings if each in PAGES)


def _in_toml(schema: Any) -> Any:
    """Return a schema with ``"none"`` in the place of null."""
    if isinstance(schema, list):
        return [_in_toml(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "null":
        return {"const": NONE}
    written = {name: _in_toml(each) for name, each in schema.items()}
    if isinstance(text := written.get("description"), str):
        written["description"] = plain_text(text)
    if "default" in written and written["default"] is None:
        written["default"] = NONE
    return written
