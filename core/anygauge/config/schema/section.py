"""Base class and types shared by all config sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from anygauge.config.secret_values import masked
from anygauge.disk import LONGEST_NAME, why_impossible

__all__ = [
    "NAME_PATTERN",
    "DType",
    "Name",
    "NonNegative",
    "Positive",
    "Probability",
    "Seconds",
    "Section",
    "is_name",
    "list_as_tuple",
    "path_alone",
]

DType = Literal["float32", "bfloat16"]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=LONGEST_NAME)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""A time limit; what waits for it counts milliseconds in 32 bits."""


class Section(BaseModel):
    """A table of the config."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*")
    @classmethod
    def _check_path(cls, value: Any) -> Any:
        """Refuse a path that no file system holds, before any rule asks for it and gets an ``OSError``."""
        problem = why_impossible(value) if isinstance(value, Path) else None
        if problem is not None:
            raise PydanticCustomError("impossible_path", "{problem}", {"problem": problem})
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Mask secrets: tracebacks and traces of hook calls print configs."""
        for name, value in super().__repr_args__():
            yield name, masked({name or "": value})[name or ""]


def is_name(text: str) -> bool:
    """Return whether a text can be a :data:`Name`."""
    return re.fullmatch(NAME_PATTERN, text) is not None and len(text) <= LONGEST_NAME


def path_alone(value: Any) -> Any:
    """Accept a string for a table whose only required key is its path."""
    return {"path": value} if isinstance(value, str) else value


def list_as_tuple(value: Any) -> Any:
    """Let a list stand for a tuple in a table that :func:`path_alone` hands on: the parser no longer does."""
    return tuple(value) if isinstance(value, list) else value
