"""Functions named in a config: resolve the dotted path, and check the options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import Parameter
from pathlib import PurePosixPath
from typing import Any

from anygauge.plugins import IMPORTABLE, Plugins, imported, is_import_path
from anygauge_hooks.errors import UnknownNameError
from anygauge_hooks.types import ConfigProblem, FunctionPath

__all__ = ["failed_plugins", "import_problems", "name_problems", "option_problems", "taken_options"]

NOT_OPTIONS = ("response", "label", "metadata", "prompt")
"""Arguments that the core passes to a reward function. Those that it passes to an estimator have no
default."""

METRIC_ARGUMENTS = ("groups", "metrics", "step")
"""Arguments that a metric function may have."""
FUNCTION_PATH = (FunctionPath, FunctionPath.__name__)
"""The annotation of such an option, also of a module that does not evaluate its annotations."""
PYTHON = "python."
"""Begins the names of functions that a program gave and that only its process has."""

Problems = Iterator[ConfigProblem]


def failed_plugins(plugins: Plugins) -> str:
    """Return which plugins failed to load, to end a hint with."""
    failed = ", ".join(f"{name} ({error!r})" for name, error in sorted(plugins.load_errors.items()))
    return f"; these plugins failed to load: {failed}" if failed else ""


def name_problems(path: str, name: str, hook: str, plugins: Plugins) -> Problems:
    """Yield why a name leads to no item of a ``register_*`` hook.

    :param path: Path of the key that holds the name.
    """
    if is_import_path(hook, name):
        yield from _imported_problems(path, name, hook, plugins)
    elif name not in (known := plugins.named(hook)):
        hint = f"no plugin provides it; available: {', '.join(sorted(known)) or 'none'}"
        close = difflib.get_close_matches(name, known, n=1)
        hint += f"; did you mean {close[0]}?" if close else ""
        hint += f"; a function of your own is {_import_path(name)}" if hook in IMPORTABLE else ""
        if name.startswith(PYTHON):
            hint = "a Python program gave this function, which has no importable name; give it again there"
        yield ConfigProblem(path=path, found=name, hint=hint + failed_plugins(plugins))


def _import_path(name: str) -> str:
    """Return how to write a name that may be the path of a file, or have a dot where a colon belongs.

    >>> _import_path("rewards/score.py"), _import_path("my_rewards.score"), _import_path("grpo")
    ('score:FUNCTION', 'my_rewards:score', 'package.module:function')
    """
    if name.endswith(".py"):
        return f"{PurePosixPath(name).stem}:FUNCTION"
    module, _, function = name.rpartition(".")
    return f"{module}:{function}" if module and function.isidentifier() else "package.module:function"


def _imported_problems(path: str, name: str, hook: str, plugins: Plugins) -> Problems:
    problems = [*import_problems(path, name)]
    yield from problems
    if not problems and plugins.find(hook, name) is None:
        yield ConfigProblem(path=path, found=name, hint="it is not a function")


def import_problems(path: str, name: str) -> Problems:
    """Yield why ``package.module:function`` leads nowhere.

    :param path: Path of the key that holds the name.
    """
    module, _, function = name.partition(":")
    if module.endswith(".py"):
        meant = f"{PurePosixPath(module).stem}:{function}"
        hint = f"write {meant}, in the directory of {PurePosixPath(module).name} or with that on PYTHONPATH"
        yield ConfigProblem(path=path, found=name, hint=hint)
        return
    if not function or not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        yield ConfigProblem(path=path, found=name, hint="write it as package.module:function")
        return
    try:
        imported(name)
    except UnknownNameError as error:
        yield ConfigProblem(path=path, found=name, hint=f"{error.args[0]} {error.hint}")


def option_problems(path: str, name: str, fn: Callable[..., Any], options: Mapping[str, Any]) -> Problems:
    """Yield which options a registered function does not take, which it lacks, and which lead nowhere.

    :param path: Path of the table that holds the options.
    """
    known = _options(fn)
    if known is None:
        return
    for option, value in options.items():
        if option not in known:
            hint = f"{name!r} has no such option; known: {', '.join(known) or 'none'}"
            yield ConfigProblem(path=f"{path}.{option}", found=value, hint=hint)
    for option, parameter in known.items():
        if parameter.default is Parameter.empty and option not in options:
            yield ConfigProblem(path=f"{path}.{option}", found=None, hint=f"{name!r} needs it")
        if parameter.annotation in FUNCTION_PATH and option in options:
            yield from import_problems(f"{path}.{option}", str(options[option]))


def taken_options(function: Callable[..., Any], options: Collection[str]) -> list[str]:
    """Return the options that a function accepts."""
    known = _options(function)
    return [option for option in options if known is None or option in known]


def _options(function: Callable[..., Any]) -> dict[str, Parameter] | None:
    """Return the options that a function takes, or ``None`` if it takes any or does not say."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return {
        name: parameter
        for name, parameter in parameters.items()
        if name not in NOT_OPTIONS
        and (parameter.kind is Parameter.KEYWORD_ONLY or parameter.default is not Parameter.empty)
    }
