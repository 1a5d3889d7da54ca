"""Old names of config keys, which work for one more release with a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from anygauge.config.tree import Tree
from anygauge_hooks.types import ConfigProblem

__all__ = ["RENAMED", "renamed_keys"]

_log = logging.getLogger(__name__)

RENAMED: Mapping[str, str] = {
    "algorithm.aggregation": "loss_aggregation",
    "critic.only_steps": "warmup_steps",
    "placement.num_workers": "train_workers",
    "rollout.graphs": "enforce_eager",
    "rollout.max_rounds": "max_num_gen_batches",
    "rollout.partial": "partial_rollout",
    "rollout.redraw": "requeue_discarded",
    "rollout.shortage": "on_incomplete_batch",
    "reward.per": "scope",
    "reward.parts.*.per": "scope",
    "eval.datasets.*.reward.per": "scope",
    "eval.datasets.*.reward.parts.*.per": "scope",
}
"""New key in the same table, by the path of the old one; ``*`` is any name."""
VALUES: Mapping[str, Mapping[Any, Any]] = {"rollout.graphs": {"auto": False, False: True, True: False}}
"""New value by old one, where a key has changed its meaning."""


def renamed_keys(
    tree: Mapping[str, Any], *, overlay: str = "", warn: bool = True
) -> tuple[Tree, list[ConfigProblem]]:
    """Return a config tree with the new names of its keys, and the keys that it has under both names.

    :param overlay: Name of the table that the tree is, such as ``on.cpu``, for the warnings.
    :param warn: Whether to warn of each old name: not for a file that a run wrote.
    """
    renamed, problems = dict(tree), list[ConfigProblem]()
    shown = f"{overlay}." if overlay else ""
    for pattern in RENAMED:
        *tables, _ = pattern.split(".")
        renamed = _replaced(renamed, tables, "", partial(_rename, pattern, shown if warn else None, problems))
    return renamed, problems


def _replaced(tree: Any, names: Sequence[str], path: str, change: Callable[[Tree, str], Tree]) -> Any:
    """Return a tree with the tables at a path changed; ``*`` is any name."""
    if not isinstance(tree, Mapping):
        return tree
    if not names:
        return change(dict(tree), path)
    return {
        name: _replaced(below, names[1:], f"{path}{name}.", change) if names[0] in (name, "*") else below
        for name, below in tree.items()
    }


def _rename(pattern: str, overlay: str | None, problems: list[ConfigProblem], table: Tree, path: str) -> Tree:
    """Return a table with a key under its new name; ``overlay`` and ``path`` end with a dot."""
    old, new = pattern.split(".")[-1], RENAMED[pattern]
    if old not in table:
        return table
    value = table.pop(old)
    if new in table:
        hint = f"is the old name of {path}{new}, which is set too; leave it out"
        problems.append(ConfigProblem(path=path + old, found=value, hint=hint))
    if overlay is not None:
        # Not the warnings module: Python hides its DeprecationWarning from those who write configs.
        path = overlay + path
        _log.warning("%s%s is deprecated; write %s%s instead", path, old, path, new)
    values = VALUES.get(pattern, {})
    table.setdefault(new, values.get(value, value) if isinstance(value, str | bool) else value)
    return table
