"""Resolve the reward functions of a config, and refuse those that cannot be called."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from anygauge.rollout.rewards.call import ARGUMENTS, TRL_ARGUMENTS, Call, TrlForm, accepted
from anygauge_hooks.errors import RewardError
from anygauge_hooks.types import NamedFunction

if TYPE_CHECKING:
    from anygauge.config.schema import Reward, RewardFunction
    from anygauge.plugins import Plugins

__all__ = ["Origin", "ResolvedReward", "is_async", "resolve_rewards"]

_HOOK = "register_reward_functions"
_HINT = (
    "Write def reward(response, label, metadata, **options) -> float; all but response may be left out, and "
    "prompt may be taken too. TRL's def reward(completions, **columns) -> list[float] is taken as well."
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a function, from which another process gets it."""

    kind: Literal["path", "pickle", "plugin"]
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedReward:
    """One reward function of a config, ready to be called."""

    name: str
    """Name of the function; empty where a config has a single one."""
    call: Call
    origin: Origin | None
    """``None`` for a function that may run in this process."""


def resolve_rewards(
    reward: Reward, plugins: Plugins, *, label_key: str | None = None, is_chat: bool = False
) -> list[ResolvedReward]:
    """Return the reward functions of a config.

    :param label_key: Column of the label, for functions in TRL's form.
    :param is_chat: Whether their completions are messages.
    :raises UnknownNameError: There is no such function.
    :raises RewardError: It cannot be called as a reward function, or none is named.
    """
    if reward.parts:
        return [_resolve(name, part, plugins, label_key, is_chat) for name, part in reward.parts.items()]
    return [_resolve("", reward, plugins, label_key, is_chat)]


def _resolve(
    name: str, reward: RewardFunction, plugins: Plugins, label_key: str | None, is_chat: bool
) -> ResolvedReward:
    if reward.function is None:
        raise RewardError("The config names no reward function.", hint="Set reward.function or reward.parts.")
    path = reward.function
    named: NamedFunction = plugins.get(_HOOK, path)
    parameters = _checked_parameters(path, named.fn, reward.options)
    trl = _trl_form(parameters, label_key, is_chat) if is_trl(parameters) else None
    call = Call(
        name=path,
        fn=named.fn,
        options=dict(reward.options),
        key=reward.key,
        extract=reward.extract == "boxed",
        per_group=reward.scope == "group" or trl is not None,
        accepted=accepted(parameters),
        trl=trl,
    )
    inline = named.inline and not is_async(named.fn)
    return ResolvedReward(name=name, call=call, origin=None if inline else _origin(path, named.fn))


def _origin(path: str, fn: Callable[..., Any]) -> Origin:
    if ":" in path:
        return Origin("path", path)
    try:
        return Origin("pickle", pickle.dumps(fn))
    except Exception:  # noqa: BLE001 - foreign code: a plugin's own pickling
        return Origin("plugin", path)


def is_async(fn: Callable[..., Any]) -> bool:
    """Return whether calling a function gives a coroutine."""
    while isinstance(fn, partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def is_trl(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a function with these parameters has TRL's form."""
    return "completions" in parameters and "response" not in parameters


def _trl_form(parameters: Mapping[str, inspect.Parameter], label_key: str | None, is_chat: bool) -> TrlForm:
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return TrlForm(
        needs=tuple(p.name for p in named if p.default is p.empty and p.name not in TRL_ARGUMENTS),
        takes=None if _takes_any(parameters) else tuple(p.name for p in named),
        label_key=label_key,
        is_chat=is_chat,
    )


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _checked_parameters(name: str, fn: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a function that can be called as a reward.

    :raises RewardError: It cannot.
    """
    if not callable(fn):
        raise RewardError(f"Reward function {name!r} is {type(fn).__name__}, not a function.", hint=_HINT)
    if inspect.isclass(inspect.unwrap(fn)):
        raise RewardError(
            f"Reward function {name!r} is a class, whose calls return objects and no numbers.",
            hint="Give an object of it, with a method __call__(self, response).",
        )
    try:
        signature = inspect.signature(fn)
    except ValueError as error:
        raise RewardError(
            f"Reward function {name!r} has no signature that Python can read.", hint=_HINT
        ) from error
    if is_trl(signature.parameters):
        return signature.parameters  # what else it needs are columns of the data
    problems = "; ".join(_signature_problems(signature, options))
    if problems:
        given = ", ".join([*ARGUMENTS, *options])
        raise RewardError(
            f"Reward function {name!r} {problems}. Its signature is {signature}; it is given {given}, by "
            "name.",
            hint=_HINT,
        )
    return signature.parameters


def _signature_problems(signature: inspect.Signature, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a call by name fails, as clauses."""
    parameters = signature.parameters.values()
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = _takes_any(signature.parameters)
    required = {p.name for p in parameters if p.default is p.empty}
    if by_position:
        yield f"takes {_quoted(by_position)} by position only"
    missing = [name for name in by_name if name in required and name not in (*ARGUMENTS, *options)]
    if missing:
        yield f"needs {_quoted(missing)}"
    wanted = ["response", *options] if "response" not in by_position else options
    unknown = [name for name in wanted if name not in by_name and not takes_any]
    if unknown:
        yield f"does not take {_quoted(unknown)}"
    twice = [name for name in options if name in ARGUMENTS]
    if twice:
        yield f"is given {_quoted(twice)} by the run and by reward.options"


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
