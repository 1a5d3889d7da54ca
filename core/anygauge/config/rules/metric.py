"""Rules of metric functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from inspect import Parameter
from typing import TYPE_CHECKING

from anygauge.config.named_functions import METRIC_ARGUMENTS
from anygauge.config.schema import Config
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import NamedFunction

__all__ = ["metric_functions"]

KEY = "run.metrics"


def metric_functions(config: Config, plugins: Plugins) -> Iterator[ConfigProblem]:
    """Yield metric functions that cannot be called with what a step has, and those that are named twice."""
    for name in dict.fromkeys(config.run.metrics):
        function: NamedFunction | None = plugins.find("register_metric_functions", name)
        if function is not None and (hint := _why_not(function)) is not None:
            yield ConfigProblem(path=KEY, found=name, hint=hint)
        if config.run.metrics.count(name) > 1:
            yield ConfigProblem(path=KEY, found=name, hint="is named twice; leave one out")


def _why_not(function: NamedFunction) -> str | None:
    if inspect.iscoroutinefunction(function.fn):
        return "an async function is not awaited here; write a plain one"
    try:
        parameters = inspect.signature(function.fn).parameters.values()
    except (TypeError, ValueError):
        return "its arguments cannot be read; wrap it in a function of your own"
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    unknown = [
        each.name
        for each in parameters
        if each.kind is Parameter.POSITIONAL_ONLY
        or (
            each.default is Parameter.empty
            and each.kind not in variadic
            and each.name not in METRIC_ARGUMENTS
        )
    ]
    if not unknown:
        return None
    return f"takes {', '.join(unknown)}; a metric function gets {', '.join(METRIC_ARGUMENTS)} by name"
