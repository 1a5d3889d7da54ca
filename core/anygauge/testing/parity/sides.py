"""Sides of a comparison, as a command line names them: ``cpu:engine=fsdp,dtype=bfloat16``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anygauge.config.overrides import read_overrides
from anygauge.config.schema import Parallel
from anygauge_hooks.errors import ConfigError

__all__ = ["REFERENCE", "Side", "parse_side"]

REFERENCE = "reference"
"""Value of ``kernels`` that takes the plain-torch reference of every op."""
_SHORT: Mapping[str, str] = {
    "engine": "train.engine",
    "dtype": "train.dtype",
    "workers": "placement.train_workers",
    **{name: f"train.parallel.{name}" for name in Parallel.model_fields},
}
"""Config keys by the short names of a side."""
_KERNELS = "kernels"
_SECTIONS = ("train.", "placement.", "run.")
"""Beginning of the config keys that decide how a model is computed."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison."""

    text: str
    """As it was given."""
    backend: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values by config key."""
    kernels: str | None = None
    """A word in the sources of the kernels to prefer, or :data:`REFERENCE`; ``None`` takes the backend's."""


def parse_side(text: str) -> Side:
    """Return a side of a comparison.

    :param text: ``BACKEND`` or ``BACKEND:KEY=VALUE,KEY=VALUE``.
    :raises ConfigError: It has not this form, or names an unknown key.

    >>> parse_side("cpu:engine=fsdp,workers=2").settings
    {'train.engine': 'fsdp', 'placement.train_workers': 2}
    """
    backend, colon, rest = text.partition(":")
    if not backend:
        raise _error(text, "names no backend")
    settings: dict[str, Any] = {}
    kernels = None
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise _error(text, f"has {part!r} where KEY=VALUE belongs")
        if key == _KERNELS:
            kernels = value
            continue
        path = _SHORT.get(key, key)
        if not path.startswith(_SECTIONS):
            raise _error(text, f"has the unknown key {key!r}")
        settings[path] = _value(path, value)
    return Side(text, backend, settings, kernels)


def _value(path: str, value: str) -> Any:
    tree, _ = read_overrides([(path, value)])
    for name in path.split("."):
        tree = tree[name]
    return tree


def _error(text: str, what: str) -> ConfigError:
    short = ", ".join((_KERNELS, *_SHORT))
    return ConfigError(
        f"{text!r} {what}.",
        hint=f"Write BACKEND or BACKEND:KEY=VALUE,KEY=VALUE. Keys are {short}, or config keys that begin "
        f"with {', '.join(_SECTIONS)}.",
    )
