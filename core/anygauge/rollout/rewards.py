"""Reward functions, and how a config names and a rollout calls them.

A reward function takes any of the keyword arguments ``response`` (required), ``label`` and ``metadata``, then
its options, and returns a finite number.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import math as _math
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from anygauge.plugins import Plugins
from anygauge.rollout.math_grader import Grader
from anygauge_hooks.errors import AnygaugeError, RewardError, UnknownNameError
from anygauge_hooks.rl import Prompt, Sample
from anygauge_hooks.types import NamedFunction

__all__ = ["RewardFunction", "exact_match", "math", "resolve_reward", "reward_functions", "score"]

RewardFunction = Callable[..., float]

_ARGUMENTS = ("response", "label", "metadata")
_EXCERPT = 80
"""Characters of a response that an error shows."""
_LARGEST = 1e30
"""Well inside float32, so that the differences within a group are too."""
_SIGNAL_CODES = (128 + signal.SIGTERM, 128 + signal.SIGHUP, signal.SIGTERM)
"""Of a :class:`SystemExit` that the run's signal handler raised, or Ray's, which takes its place."""


def reward_functions() -> list[NamedFunction]:
    """Return the reward functions that come with the core."""
    return [NamedFunction(name="exact_match", fn=exact_match), NamedFunction(name="math", fn=math)]


def exact_match(
    response: str, label: Any, metadata: Mapping[str, Any] | None = None, *, strip: bool = True
) -> float:
    """Return 1 if the response is the label, else 0.

    :param response: The text of a sample.
    :param label: A string, or a number or boolean that is compared as the string it prints as.
    :param metadata: Not used.
    :param strip: Ignore white space around both.
    """
    if label is None:
        raise RewardError("exact_match needs a label.", hint="Set data.label_key.")
    if isinstance(label, (list, dict)):
        raise RewardError(
            f"The label is a {type(label).__name__}: {label!r:.80}",
            hint="Let data.label_key name a field with a string, a number or a boolean.",
        )
    expected = str(label)
    if strip:
        response, expected = response.strip(), expected.strip()
    return float(response == expected)


def math(
    response: str, label: Any, metadata: Mapping[str, Any] | None = None, *, timeout_s: float = 5.0
) -> float:
    r"""Return 1 if the answer in the response equals the label as mathematics, else 0.

    The answer is what is in ``\boxed{}``, else the number after ``####``, else the last expression. Judged
    by the math-verify library, in a process of its own.

    :param response: The text of a sample.
    :param label: A number, or a string with an expression: alone, boxed, or after ``####`` as in GSM8K.
    :param metadata: Not used.
    :param timeout_s: CPU seconds; an answer that takes longer to judge is wrong.
    """
    if label is None:
        raise RewardError("math needs a label.", hint="Set data.label_key.")
    return float(_grader(os.getpid()).equivalent(response, str(label), timeout_s))


@cache
def _grader(pid: int) -> Grader:
    """Return the grader of this process; a fork must not share its parent's pipe."""
    grader = Grader()
    atexit.register(grader.close)
    return grader


def resolve_reward(name: str, plugins: Plugins, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the reward function that a config names.

    :param name: A registered name, or ``package.module:function``.
    :param options: The keyword arguments that it will get, to check that it takes them.
    :raises UnknownNameError: There is no such function.
    :raises RewardError: It cannot be called as a reward function.
    """
    fn: RewardFunction = _imported(name) if ":" in name else plugins.get("register_reward_functions", name).fn
    _check_signature(name, fn, options or {})
    return fn


def _imported(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a user's module runs anybody's code
        raise UnknownNameError(
            f"Reward function {path!r}: importing {module_name!r} raised {error!r}.",
            hint="It must be importable: install it, or put its folder on PYTHONPATH.",
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UnknownNameError(
                f"Reward function {path!r}: {module_name!r} has no {attribute!r}.",
                hint=f"Define it in {getattr(module, '__file__', None)}, or name a function that it has.",
            )
        found = getattr(found, part)
    return found


def _check_signature(name: str, fn: Any, options: Mapping[str, Any]) -> None:
    hint = (
        "Write def reward(response, label, metadata, **options) -> float; label and metadata may be left out."
    )
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        kind = "is a coroutine function" if callable(fn) else f"is {type(fn).__name__}, not a function"
        raise RewardError(f"Reward function {name!r} {kind}.", hint=hint)
    try:
        problems = "; ".join(_signature_problems(inspect.signature(fn), options))
    except ValueError as error:
        raise RewardError(
            f"Reward function {name!r} has no signature that Python can read.", hint=hint
        ) from error
    if problems:
        given = ", ".join([*_ARGUMENTS, *options])
        raise RewardError(f"Reward function {name!r} {problems}. It is given {given}, by name.", hint=hint)


def _signature_problems(signature: inspect.Signature, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a call by name fails, as clauses."""
    parameters = signature.parameters.values()
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {p.name for p in parameters if p.default is p.empty}
    if by_position:
        yield f"takes {_quoted(by_position)} by position only"
    missing = [name for name in by_name if name in required and name not in (*_ARGUMENTS, *options)]
    if missing:
        yield f"needs {_quoted(missing)}"
    wanted = ["response", *options] if "response" not in by_position else options
    unknown = [name for name in wanted if name not in by_name and not takes_any]
    if unknown:
        yield f"does not take {_quoted(unknown)}"
    twice = [name for name in options if name in _ARGUMENTS]
    if twice:
        yield f"is given {_quoted(twice)} by the run and by reward.options"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _accepted(fn: RewardFunction) -> list[str]:
    """Return which of the arguments of a reward function this one takes by keyword."""
    parameters = inspect.signature(fn).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(_ARGUMENTS)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name in _ARGUMENTS if name in parameters and parameters[name].kind in kinds]


def score(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    reward: RewardFunction,
    options: Mapping[str, Any] | None = None,
) -> list[float]:
    """Return the reward of each sample.

    :param samples: Responses to any of ``prompts``, found by their ``prompt_index``.
    :param reward: From :func:`resolve_reward`.
    :param options: Keyword arguments of the function.
    :raises RewardError: The function raised, or returned something that is no finite number.
    """
    by_index = {prompt.index: prompt for prompt in prompts}
    accepted = _accepted(reward)
    return [
        _score(sample, by_index[sample.prompt_index], reward, accepted, options or {}) for sample in samples
    ]


def _score(
    sample: Sample,
    prompt: Prompt,
    reward: RewardFunction,
    accepted: Sequence[str],
    options: Mapping[str, Any],
) -> float:
    values = {"response": sample.text, "label": prompt.label, "metadata": prompt.metadata}
    try:
        value: Any = reward(**{name: values[name] for name in accepted}, **options)
    except (Exception, SystemExit) as error:  # a reward function is anybody's code
        if isinstance(error, SystemExit) and error.code in _SIGNAL_CODES:
            raise
        raise _failure(error, _where(sample, prompt, reward)) from error
    if type(value) is float and abs(value) <= _LARGEST:
        return value
    problem = _value_problem(value)
    if problem:
        raise RewardError(
            f"{_where(sample, prompt, reward)} returned {problem}.",
            hint="Return one finite number.",
        )
    return float(value)


def _failure(error: BaseException, where: str) -> RewardError:
    """Return the error of a call that raised: an own one's words, or where in the user's file it was."""
    if isinstance(error, AnygaugeError):
        return RewardError(f"{where} failed: {error.args[0]}", hint=error.hint)
    frames = traceback.extract_tb(error.__traceback__)[1:]
    # What the user wrote, and not the library that it called.
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return RewardError(f"{where} raised {error!r}{place}.", hint="ANYGAUGE_DEBUG=1 shows the traceback.")


def _value_problem(value: Any) -> str | None:
    """Return what a reward is that is no number to train on, or ``None``."""
    if not isinstance(value, Real):
        return repr(value)
    try:
        shown, number = repr(value), float(value)
    except (OverflowError, ValueError):  # Python writes no integer of more than 4300 digits
        shown, number = f"{type(value).__name__} beyond any float", _LARGEST * 2
    if not _math.isfinite(number):
        return shown
    return f"{shown}, too large for float32 (the limit is {_LARGEST:g})" if abs(number) > _LARGEST else None


def _where(sample: Sample, prompt: Prompt, reward: RewardFunction) -> str:
    function = f"{reward.__module__}:{getattr(reward, '__qualname__', type(reward).__name__)}"
    source = f" ({prompt.source})" if prompt.source else ""
    excerpt = sample.text[:_EXCERPT] + ("..." if len(sample.text) > _EXCERPT else "")
    return f"Reward function {function} on prompt {prompt.index}{source}, response {excerpt!r},"
