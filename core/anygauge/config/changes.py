"""Config values that plugins fill in: keys that the user left out, never one that the user wrote."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anygauge.config.schema import Config
from anygauge.config.tree import Tree, covers, plain, put
from anygauge.config.validate import validate
from anygauge_hooks.errors import ConfigConflictError, PluginError

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec, ConfigChange, ConfigProblem

__all__ = ["AppliedChange", "adjust"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AppliedChange:
    """One key that a plugin filled in."""

    plugin: str
    path: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.path} = {self.value!r} ({self.plugin}: {self.reason})"


def adjust(
    tree: Mapping[str, Any],
    config: Config,
    backend: BackendSpec,
    plugins: Plugins,
    user_keys: Collection[str],
) -> tuple[Tree, tuple[AppliedChange, ...]]:
    """Apply every plugin's defaults to a copy of the tree.

    All answers are collected before any is applied, so the order of the plugins does not matter.

    :param config: Config that the plugins see, read from ``tree``.
    :param user_keys: Dotted paths that the user wrote; a change to one of them is dropped.
    :raises ConfigConflictError: Two plugins want different values for one key.
    :raises PluginError: A change does not fit the schema.
    """
    changes: dict[str, AppliedChange] = {}
    for change in _wanted(config, backend, plugins):
        if any(covers(change.path, key) for key in user_keys):
            _log.debug("Dropped, because the user wrote this key: %s", change)
            continue
        _check_conflict(change, changes)
        changes[change.path] = change
    adjusted = copy.deepcopy(dict(tree))
    for change in changes.values():
        put(adjusted, change.path, change.value)
        for problem in validate(adjusted).problems:
            if covers(plain(problem.path), change.path):
                raise _bad_change(change, problem)
        _log.info("%s", change)
    return adjusted, tuple(changes.values())


def _wanted(config: Config, backend: BackendSpec, plugins: Plugins) -> Iterator[AppliedChange]:
    wanted: ConfigChange
    for owner, wanted in plugins.answers("adjust_config", config=config, backend=backend):
        yield AppliedChange(owner, wanted.path, wanted.value, wanted.reason)


def _check_conflict(change: AppliedChange, changes: Mapping[str, AppliedChange]) -> None:
    for other in changes.values():
        same = other.path == change.path and other.value == change.value
        if covers(change.path, other.path) and not same:
            raise ConfigConflictError(
                f"adjust_config: {other.plugin} sets {other.path} = {other.value!r} ({other.reason}) and "
                f"{change.plugin} sets {change.path} = {change.value!r} ({change.reason}).",
                hint=f"Write {change.path} in the config yourself, or uninstall one of the two plugins.",
            )


def _bad_change(change: AppliedChange, problem: ConfigProblem) -> PluginError:
    return PluginError(
        f"Plugin {change.plugin!r} sets {change.path} = {change.value!r}: {problem.hint}.",
        hint="Report this to the plugin; writing the key in the config yourself avoids it.",
    )
