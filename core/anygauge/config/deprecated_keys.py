"""Old names of config keys, which work for one more release with a warning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from anygauge.config.tree import Tree
from anygauge_hooks.types import ConfigProblem

__all__ = ["RENAMED", "renamed_keys"]

_log = logging.getLogger(__name__)

RENAMED: Mapping[tuple[str, str], str] = {
    ("algorithm", "aggregation"): "loss_aggregation",
    ("critic", "only_steps"): "warmup_steps",
    ("placement", "num_workers"): "train_workers",
    ("rollout", "partial"): "partial_rollout",
}
"""The new key, by section and old key."""


def renamed_keys(tree: Mapping[str, Any], *, warn: bool = True) -> tuple[Tree, list[ConfigProblem]]:
    """Return a config tree with the new names of its keys, and the keys that it has under both names.

    :param warn: Whether to warn of each old name: not for a file that a run wrote.
    """
    renamed, problems = dict(tree), []
    for (section, old), new in RENAMED.items():
        table = renamed.get(section)
        if not isinstance(table, Mapping) or old not in table:
            continue
        if new in table:
            hint = f"is the old name of {section}.{new}, which is set too; leave it out"
            problems.append(ConfigProblem(path=f"{section}.{old}", found=table[old], hint=hint))
        renamed[section] = {key: value for key, value in table.items() if key != old}
        renamed[section].setdefault(new, table[old])
        if warn:
            # Not the warnings module: Python hides its DeprecationWarning from those who write configs.
            _log.warning("%s.%s is deprecated; write %s.%s instead", section, old, section, new)
    return renamed, problems
