"""The fields of Megatron's configs, read from its source without importing it.

A config is checked on the driver, where Megatron would cost seconds and would be imported before it is
prepared for the backend.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.util
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveInt, TypeAdapter, ValidationError

from anygauge.disk import parse_toml
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.config.schema import Train

__all__ = ["PASSED", "TUNABLE", "config_fields", "option_problems", "unknown_values"]

_FILES = {
    "transformer": ("model_parallel_config.py", "transformer/transformer_config.py"),
    "ddp": ("distributed/distributed_data_parallel_config.py",),
    "optimizer": ("optimizer/optimizer_config.py",),
}
_CLASSES = {"ModelParallelConfig", "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"}

_TABLES = parse_toml(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TUNABLE = frozenset(_TABLES["tunable"])
"""Fields that a family sets and a user may change: how it trains, not which model it is."""
PASSED = TUNABLE | frozenset(_TABLES["passed"])
"""Fields that a user may set."""
_REFUSED = {name: table["why"] for table in _TABLES["refused"] for name in table["fields"]}
_KNOWN_VALUES = {
    name: table.get("values", [table.get("value")]) for table in _TABLES["known"] for name in table["fields"]
}
_UNREAD = "No part of the engine reads it, so it would change nothing."
_ALONE = "It changes nothing alone: it needs {}."
_NEEDS: Mapping[str, tuple[str, Callable[[Train], object]]] = {
    **dict.fromkeys(
        ("recompute_method", "recompute_num_layers"),
        (_ALONE.format('train.recompute = "full"'), lambda train: train.recompute == "full"),
    ),
    "microbatch_group_size_per_vp_stage": (
        _ALONE.format("train.parallel.virtual_pipeline above 1"),
        lambda train: train.parallel.virtual_pipeline > 1,
    ),
    "bucket_size": (
        _ALONE.format("overlap_grad_reduce"),
        lambda train: train.megatron.get("overlap_grad_reduce"),
    ),
    "decoupled_min_lr": (_ALONE.format("decoupled_lr"), lambda train: "decoupled_lr" in train.megatron),
    "sgd_momentum": (
        _ALONE.format('optimizer = "sgd"'),
        lambda train: train.megatron.get("optimizer") == "sgd",
    ),
    "overlap_param_gather": (
        "Without the distributed optimizer nothing is gathered: leave out use_distributed_optimizer = false.",
        lambda train: not train.megatron["overlap_param_gather"] or _divides_optimizer(train),
    ),
    "optimizer": (
        "The distributed optimizer takes Adam alone: add use_distributed_optimizer = false.",
        lambda train: train.megatron["optimizer"] == "adam" or not _divides_optimizer(train),
    ),
}
"""Fields that need another key: what is wrong without it, and whether it is there."""

_KINDS: Mapping[str, Any] = {"int": PositiveInt, "float": NonNegativeFloat}
"""How numbers are read: those of the fields that pass are counts, rates and shares, none below zero."""
_NARROWER: Mapping[str, Any] = {"optimizer": Literal["adam", "sgd"]}
"""Fields whose annotation takes more than Megatron does."""


@cache
def config_fields() -> Mapping[str, frozenset[str]]:
    """Return the field names of ``TransformerConfig``, the DDP config and ``OptimizerConfig``.

    :returns: Names under ``"transformer"``, ``"ddp"`` and ``"optimizer"``.
    """
    return {part: frozenset(fields) for part, fields in _annotations().items()}


@cache
def _annotations() -> Mapping[str, Mapping[str, str]]:
    """Return the type annotations of Megatron's fields, by class."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None, "megatron-core is a dependency"
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))) / "core"
    return {
        part: {name: kind for file in files for name, kind in _fields(root / file)}
        for part, files in _FILES.items()
    }


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id, ast.unparse(statement.annotation)


def option_problems(train: Train, role: str = "train") -> Iterator[ConfigProblem]:
    """Yield problems of the table ``[train.megatron]``.

    :param train: Table of the role, such as ``[train]``.
    """
    known = sorted(frozenset().union(*config_fields().values()))
    for name, value in train.megatron.items():
        hint = _hint(name, known) or _misfit(name, value) or _unmet(name, train)
        if hint:
            yield ConfigProblem(path=f"{role}.megatron.{name}", found=value, hint=hint)


def unknown_values(architecture: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of an architecture that the modules of the engine would disregard.

    :param architecture: Fields of ``TransformerConfig`` that a family sets.
    """
    for name, value in architecture.items():
        if name in _KNOWN_VALUES and getattr(value, "__name__", value) not in (known := _KNOWN_VALUES[name]):
            yield f"{name} = {value!r}, not {' or '.join(map(repr, known))}"


def _hint(name: str, known: list[str]) -> str | None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        names = f"close names: {', '.join(close)}" if close else "no name is close"
        return f"Not a field of Megatron's configs; {names}."
    return None if name in PASSED else _REFUSED.get(name, _UNREAD)


class _Names(dict[str, Any]):
    """Names that annotations resolve to; a class that TOML has no value of stands for any other name."""

    def __missing__(self, name: str) -> type:
        return type(name, (), {})


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """Return the validator of a field."""
    annotation = next(fields[name] for fields in _annotations().values() if name in fields)
    names = _Names(vars(builtins) | vars(typing) | dict(_KINDS))
    kind = _NARROWER[name] if name in _NARROWER else eval(annotation, {}, names)
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(kind, config=strict)


def _misfit(name: str, value: Any) -> str | None:
    """Return why a value is not of the type that Megatron annotates its field with."""
    try:
        _adapter(name).validate_python(value)
    except ValidationError as error:
        kinds = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in error.errors())
        return f"Megatron cannot take it: it must be {' or '.join(kinds)}."
    return None


def _unmet(name: str, train: Train) -> str | None:
    hint, is_met = _NEEDS.get(name, ("", lambda train: True))
    return None if is_met(train) else hint


def _divides_optimizer(train: Train) -> bool:
    return bool(train.megatron.get("use_distributed_optimizer", True))
