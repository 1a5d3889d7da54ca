"""Metric functions of the user: called with the samples and the metrics of each step, and checked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anygauge.config.named_functions import METRIC_ARGUMENTS
from anygauge.failures import raised_at
from anygauge_hooks.errors import MetricError
from anygauge_hooks.rl import Group

if TYPE_CHECKING:
    from anygauge.plugins import Plugins

__all__ = ["CUSTOM", "custom_metrics", "metric_functions"]

CUSTOM = "custom"
"""Group of these metrics. No other metric is in it, so that none is overwritten."""
NAME = re.compile(r"(?!step$)[A-Za-z0-9_.@-]{1,100}(/[A-Za-z0-9_.@-]{1,100}){0,3}")
"""Name of a metric within its group; ``step`` is the axis of the group."""
SHOWN = 80
"""Characters of a wrong name or value in an error."""
SIGNALED = 128
"""A signal that comes while a function runs exits with this and its number: the function is not to blame."""

MetricFunction = Callable[..., Any]
"""Takes by name what it needs of ``groups``, ``metrics`` and ``step``, and returns a dict or ``None``."""


def metric_functions(names: Iterable[str], plugins: Plugins) -> Mapping[str, MetricFunction]:
    """Return the functions of ``run.metrics``.

    :raises UnknownNameError: There is no such function.
    """
    return {name: plugins.get("register_metric_functions", name).fn for name in names}


def custom_metrics(
    functions: Mapping[str, MetricFunction],
    groups: Sequence[Group],
    metrics: Mapping[str, float],
    *,
    step: int,
) -> dict[str, float]:
    """Return ``custom/*`` of a step.

    :param groups: Scored groups that the step trained on; none in a run that generates nothing.
    :param metrics: Other metrics of the step.
    :raises MetricError: A function raised, or returned anything but names with numbers.
    """
    owners: dict[str, str] = {}
    values: dict[str, float] = {}
    for name, function in functions.items():
        given = {"groups": groups, "metrics": dict(metrics), "step": step}
        with _blamed(name, step):
            result = list(_checked(name, _called(function, given)))
        for metric, value in result:
            if metric in values:
                raise MetricError(
                    f"Metric functions {owners[metric]!r} and {name!r} both return {metric!r}.",
                    hint="Give one of the two metrics another name.",
                )
            owners[metric], values[metric] = name, value
    return {f"{CUSTOM}/{metric}": value for metric, value in values.items()}


@contextmanager
def _blamed(name: str, step: int) -> Iterator[None]:
    """Raise what a function, or a value that it returned, raises in the block as an error that names it."""
    try:
        yield
    except MetricError:
        raise
    except (Exception, SystemExit) as error:  # foreign code: a metric function
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > SIGNALED:
            raise
        raise MetricError(
            f"Metric function {name!r} failed in step {step}: {type(error).__name__}: {error}"
            f"{raised_at(error)}",
            hint="Correct the function, or take it out of run.metrics.",
        ) from error


def _called(function: Callable[..., Any], given: Mapping[str, Any]) -> object:
    """Return what a function returns, which gets the arguments that it names."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    arguments = {key: given[key] for key in METRIC_ARGUMENTS if takes_all or key in parameters}
    return function(**arguments)


def _checked(name: str, result: object) -> Iterator[tuple[str, float]]:
    """Yield names and numbers of a function's result."""
    if result is None:  # nothing to tell of this step
        return
    if not isinstance(result, Mapping):
        raise MetricError(
            f"Metric function {name!r} returned {_shown(result)}, which is no dict of names and numbers.",
            hint='Return a dict such as {"distinct_answers": 3}, or None for a step without metrics.',
        )
    for metric, value in result.items():
        if not (isinstance(metric, str) and NAME.fullmatch(metric)):
            raise MetricError(
                f"Metric function {name!r} named a metric {_shown(metric)}.",
                hint="Use letters, digits, '_', '.', '@' and '-' in up to four parts separated by '/'; the "
                f"name is recorded as {CUSTOM}/NAME, and 'step' is taken.",
            )
        yield metric, _number(name, metric, value)


def _number(name: str, metric: str, value: object) -> float:
    """Return a number, or a tensor or an array of one, as a float."""
    is_single = getattr(value, "shape", ()) == ()
    if not isinstance(value, str | bytes) and is_single and hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise MetricError(
        f"Metric function {name!r} returned {_shown(value)} for {metric!r}, which is no number.",
        hint="Return an int, a float or a bool; a mean of a list, its length, or 0 for what is not there.",
    )


def _shown(value: object) -> str:
    text = ascii(value)
    return f"{text if len(text) <= SHOWN else text[:SHOWN] + '...'} ({type(value).__name__})"
