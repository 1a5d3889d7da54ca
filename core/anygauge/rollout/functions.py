"""Functions that a config names: resolved, bound to their options, and called; and built-in ones."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from anygauge.plugins import imported
from anygauge.rollout.function_clock import FunctionClock, OwnTime
from anygauge.rollout.rewards.call import failure
from anygauge.rollout.rewards.resolve import is_async
from anygauge.rollout.samples import check_sample
from anygauge_hooks.errors import PluginError, RolloutError
from anygauge_hooks.rl import Group, Prompt, Sample
from anygauge_hooks.rollout import Rollout

if TYPE_CHECKING:
    from anygauge.config.schema import Rollout as RolloutConfig
    from anygauge.plugins import Plugins

__all__ = [
    "UserFunction",
    "UserFunctions",
    "apply_hooks",
    "passes",
    "resolve_functions",
    "run_function",
    "single_turn",
    "zero_variance",
]


class UserFunction(NamedTuple):
    """A function with its options."""

    name: str
    """As the config names it."""
    fn: Callable[..., Any]


class UserFunctions(NamedTuple):
    """User functions of a config."""

    rollout: UserFunction
    after_sample: Sequence[UserFunction] = ()
    filters: Sequence[UserFunction] = ()


def resolve_functions(config: RolloutConfig, plugins: Plugins) -> UserFunctions:
    """Return the functions of a config.

    :raises UnknownNameError: There is no such function.
    :raises PluginError: It cannot be called as what it is named for.
    """

    def rollout(name: str) -> Any:
        return plugins.get("register_rollout_functions", name).fn

    def filter_(name: str) -> Any:
        return plugins.get("register_sample_filters", name).fn

    function = _resolved(config.function, "Rollout function", rollout, config.function_options)
    if not is_async(function.fn):
        raise PluginError(
            f"Rollout function {function.name!r} is not async.",
            hint="Write async def fn(rollout, prompt, seed, **options), which returns a Sample or several.",
        )
    return UserFunctions(
        function,
        [_resolved(name, "Function", None, {}) for name in config.after_sample],
        [_resolved(name, "Filter", filter_, config.filter_options.get(name, {})) for name in config.filters],
    )


def _resolved(
    name: str, kind: str, registered: Callable[[str], Any] | None, options: Mapping[str, Any]
) -> UserFunction:
    fn = imported(name, kind) if registered is None else registered(name)
    if not callable(fn):
        raise PluginError(f"{kind} {name!r} is {type(fn).__name__}, not a function.", hint="Name a function.")
    return UserFunction(name, partial(fn, **options) if options else fn)


async def single_turn(rollout: Rollout, prompt: Prompt, seed: int) -> Sample:
    """Return what the policy says to the prompt."""
    draft = rollout.draft()
    await draft.generate()
    return draft.sample()


class FunctionFailed(Exception):
    """Why a function of the user's did not do what it was asked for, as a clause with its name."""


async def run_function(
    function: UserFunction, rollout: Rollout, prompt: Prompt, seed: int, clock: FunctionClock, own: OwnTime
) -> tuple[Sample, ...]:
    """Return the samples of a rollout.

    :param clock: Limits the time that the function may take for itself, ``own``.
    :raises FunctionFailed: It raised, took too long, or returned something else.
    """
    is_late = False
    clock.begin(own)
    try:
        try:
            returned = await function.fn(rollout, prompt, seed)
        finally:
            is_late = clock.end(own)
        if isinstance(returned, Sample):
            return (check_sample(returned, prompt),)
        return _checked(returned, prompt)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # foreign code: a rollout function
        if is_late:
            why = f"took more than {clock.limit_s:g} s between two generations (rollout.function_timeout_s)"
            raise FunctionFailed(f"{function.name} {why}") from error
        raise _failed(function, error) from error


def _checked(returned: Any, prompt: Prompt) -> tuple[Sample, ...]:
    samples = returned if isinstance(returned, list | tuple) else [returned]
    if not samples:
        raise RolloutError("No sample was returned.", hint="Return at least one.")
    return tuple(check_sample(sample, prompt) for sample in samples)


async def apply_hooks(hooks: Sequence[UserFunction], sample: Sample, prompt: Prompt) -> Sample:
    """Return a finished sample once every hook has seen it, or put another in its place.

    :raises FunctionFailed: One raised, or returned something else.
    """
    for hook in hooks:
        with _failures_of(hook):
            replaced = await _value(hook.fn(sample, prompt))
            sample = sample if replaced is None else check_sample(replaced, prompt)
    return sample


async def passes(filter_: UserFunction, group: Group) -> bool:
    """Return whether a filter lets a group pass.

    :raises FunctionFailed: It raised, or returned something else than a truth value.
    """
    with _failures_of(filter_):
        verdict = await _value(filter_.fn(group))
        if isinstance(verdict, bool) or type(verdict).__name__ == "bool":
            return bool(verdict)
        raise RolloutError(
            f"A {type(verdict).__name__} was returned, not a bool.", hint="Return True to keep the group."
        )


@contextmanager
def _failures_of(function: UserFunction) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # foreign code: functions of the user
        raise _failed(function, error) from error


def _failed(function: UserFunction, error: BaseException) -> BaseException:
    """Return the error of a function that raised, or the end of its task, where that was asked for.

    A function may raise ``CancelledError`` too, of something that it waited for: the task goes on.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        return error
    return FunctionFailed(f"{function.name} {failure(error)}")


async def _value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def zero_variance(group: Group, tolerance: float = 0.0) -> bool:
    """Return whether the rewards of a group differ, https://arxiv.org/abs/2503.14476 equation 11.

    Equal rewards have no advantage over each other, so that such a group teaches nothing.

    :param tolerance: Rewards that are no further apart count as equal.
    """
    rewards = [
        sample.reward for sample in group.samples if sample.error is None and sample.reward is not None
    ]
    return len(rewards) > 1 and max(rewards) - min(rewards) > tolerance
