"""Rewards that a program gives as functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from importlib.util import find_spec
from typing import Any

from anygauge.config.named_functions import PYTHON
from anygauge.config.schema import Config
from anygauge.rollout.rewards.limited import Limited
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import NamedFunction

__all__ = ["GivenFunctions", "import_path", "reward_table"]

TIMEOUT_S = 30.0
METRICS = "run.metrics"
"""Key of the metric functions."""


class GivenFunctions:
    """Plugin with the reward and the metric functions of one call.

    A function of a module is named ``module:function`` and runs in the reward processes, as from a config. A
    lambda, or a function of a notebook's cell or of ``__main__``, has no such name: it stays in this process.
    """

    def __init__(self) -> None:
        self.limited = Limited(TIMEOUT_S)
        self._rewards: dict[str, Callable[..., Any]] = {}
        self._metrics: dict[str, Callable[..., Any]] = {}

    def name(self, key: str, function: Callable[..., Any]) -> str:
        """Return the name that stands in the config for a function.

        :param key: Dotted path of the config key.
        :raises ConfigError: Only an importable function can be the value of this key.
        """
        path = import_path(function)
        if path is not None:
            return path
        if key.partition(".")[0] not in Config.model_fields:
            return _stem(function)  # the check of the config refuses the key, and names the one that is meant
        functions = self._metrics if key == METRICS else self._rewards
        if key != METRICS and "reward" not in key.split("."):
            raise ConfigError(
                f"{key} is {function!r}, which other processes cannot import.",
                hint="Define it in a module; only rewards and metrics may be lambdas or in a notebook.",
            )
        stem = _stem(function)
        name, number = f"{PYTHON}{stem}", 1
        while functions.get(name, function) is not function:
            number += 1
            name = f"{PYTHON}{stem}-{number}"
        functions[name] = function
        return name

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        """Return the functions that stay in this process."""
        wrap = self.limited.wrap
        return [NamedFunction(name=name, fn=wrap(fn), inline=True) for name, fn in self._rewards.items()]

    @hookimpl
    def register_metric_functions(self) -> list[NamedFunction]:
        """Return the metric functions, which run in the driver in any case."""
        return [NamedFunction(name=name, fn=fn) for name, fn in self._metrics.items()]


def import_path(function: Callable[..., Any]) -> str | None:
    """Return ``package.module:function``, or ``None`` if that leads to something else.

    >>> import json
    >>> import_path(json.dumps), import_path(lambda response: 0.0)
    ('json:dumps', None)
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or "<" in name or not name:
        return None
    try:
        is_there = find_spec(module) is not None
        target: Any = reduce(getattr, name.split("."), sys.modules[module])
    except (AttributeError, ImportError, KeyError, ValueError):
        return None
    return f"{module}:{name}" if is_there and target is function else None


def _stem(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else str(name)


Reward = str | Callable[..., Any] | Mapping[str, Any]
"""A registered name, ``package.module:function``, a function, or a table as of the config."""


def reward_table(reward: Reward | Sequence[Any]) -> dict[str, Any]:
    """Return ``[reward]`` for what a program gave as its reward.

    :param reward: One reward, or several that are added up; ``(reward, weight)`` weighs one of them.

    >>> reward_table(["math", (len, 0.1)])["parts"]["len"]
    {'function': <built-in function len>, 'weight': 0.1}
    """
    if isinstance(reward, Mapping):
        return dict(reward)
    if not isinstance(reward, list | tuple):
        return {"function": _checked(reward)}
    parts: dict[str, Any] = {}
    for each in reward:
        table = _part(each)
        stem = _part_name(table["function"])
        name, number = stem, 1
        while name in parts:
            number += 1
            name = f"{stem}-{number}"
        parts[name] = table
    if len(parts) == 1 and "weight" not in table:
        return table
    return {"function": "none", "parts": parts}


def _part(item: Any) -> dict[str, Any]:
    if isinstance(item, Mapping) and "function" in item:
        return dict(item)
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], int | float):
        return {"function": _checked(item[0]), "weight": item[1]}
    return {"function": _checked(item)}


def _checked(item: Any) -> Any:
    if isinstance(item, str) or callable(item):
        return item
    raise ConfigError(
        f"reward is {item!r:.80} ({type(item).__name__}), which is no reward.",
        hint="Give a function, the name of one, a table of [reward], or a list of these; (reward, 0.5) in a "
        "list has a weight.",
    )


def _part_name(function: Any) -> str:
    return str(function).rpartition(":")[2] if isinstance(function, str) else _stem(function)
