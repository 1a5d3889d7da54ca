"""Configs with which the suite calls the hooks that take one; no file of theirs exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anygauge.config import Config
from anygauge.config.changes import adjust
from anygauge.config.tree import merge
from anygauge.config.validate import validate
from anygauge.plugins import Plugins
from anygauge_hooks.types import BackendSpec

__all__ = ["RECIPES", "adjusted", "recipe"]

_BASE = {"run": {"name": "conformance"}, "model": {"path": "model"}, "data": {"train": ["data.jsonl"]}}
_SERVED = {"rollout": {"engine": "sglang"}, "placement": {"rollout_workers": 1}}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "rl": {},
    "sft": {"run": {"task": "sft"}},
    "deterministic": {"run": {"deterministic": True}},
    "parallel": {"placement": {"train_workers": 2}, "train": {"parallel": {"tensor": 2}}},
    "served": _SERVED,
    "colocated": merge(_SERVED, {"placement": {"colocated": True}}),
    "float32": {"train": {"dtype": "float32"}},
}
"""Tables of a config beside the keys that every config needs, by name."""


def recipe(tables: Mapping[str, Any]) -> Config:
    """Return a config of these tables, as no plugin has seen it."""
    checked = validate(merge(_BASE, tables))
    assert not checked.problems, checked.problems
    return checked.config


def adjusted(tables: Mapping[str, Any], backend: BackendSpec, plugins: Plugins) -> Config:
    """Return a config of these tables, with what plugins fill in."""
    tree, _ = adjust(merge(_BASE, tables), recipe(tables), backend, plugins, user_keys=())
    checked = validate(tree)
    assert not checked.problems, checked.problems
    return checked.config
