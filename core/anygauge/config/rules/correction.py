"""Rules of off-policy corrections: ``algorithm.correction`` and ``mask_stale``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, assert_never

from anygauge.config.named_functions import option_problems
from anygauge.config.rules.algorithm import value_problems
from anygauge.config.schema import Config
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import NamedFunction

__all__ = ["correction_rules", "stale_rule"]

OLD = "old_log_probs"
WEIGHING = ("tis", "icepop", "mis")
"""Built-in corrections that weigh by the ratio; the others only mask."""

Problems = Iterator[ConfigProblem]


def correction_rules(config: Config, plugins: Plugins) -> Problems:
    """Yield options that a correction does not take, and corrections without effect or applied twice."""
    corrections = config.algorithm.correction
    if not corrections or config.run.task == "sft":
        return
    found = {name: plugins.find("register_corrections", name) for name in corrections}
    known = {name: function for name, function in found.items() if function is not None}
    for name, function in known.items():  # an unknown name is a problem of its own
        yield from _options(function, corrections[name])
        yield from _registered(function)
    weighing = [name for name in corrections if name in WEIGHING]
    if len(weighing) > 1:
        hint = f"{_listed(weighing)} would weigh each token by the ratio more than once; keep one of them"
        yield ConfigProblem(path="algorithm.correction", found=sorted(corrections), hint=hint)
    comparing = [name for name in corrections if name in known and OLD in known[name].needs]
    if comparing and config.algorithm.old_log_probs == "rollout":
        hint = f"leaves {_listed(comparing)} nothing to correct: the ratio of the loss is taken against the "
        hint += 'rollout itself; write "recompute", or leave these corrections out'
        yield ConfigProblem(path="algorithm.old_log_probs", found="rollout", hint=hint)


def stale_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield a bound that masks every token, or none."""
    bound, rollout = config.algorithm.mask_stale, config.rollout
    if bound is None or config.run.task == "sft":
        return
    match rollout.schedule:
        case "sync" if rollout.partial_rollout:
            return
        case "sync":
            hint = "has no effect: without rollout.partial_rollout all tokens are of the trained weights"
        case "one_step_off" if bound == 0:
            hint = 'masks every token: with rollout.schedule = "one_step_off" all are one version old'
        case "one_step_off":
            hint = 'has no effect: with rollout.schedule = "one_step_off" no token is older than one version'
        case "async":
            if bound < rollout.max_staleness:
                return
            hint = f"has no effect: no token is older than rollout.max_staleness = {rollout.max_staleness}"
        case _:
            assert_never(rollout.schedule)
    yield ConfigProblem(path="algorithm.mask_stale", found=bound, hint=f"{hint}; leave it out")


def _options(function: NamedFunction, options: Mapping[str, Any]) -> Problems:
    path = f"algorithm.correction.{function.name}"
    problems = [
        *option_problems(path, function.name, function.fn, options),
        *value_problems(path, function, options),
    ]
    yield from problems
    if problems:
        return
    defaults = {name: each.default for name, each in signature(function.fn).parameters.items()}
    low, high = ({**defaults, **options}.get(name, Parameter.empty) for name in ("low", "high"))
    if all(isinstance(bound, int | float) for bound in (low, high)) and low > high:
        hint = f"must be at most {function.name}.high = {high}"
        yield ConfigProblem(path=f"{path}.low", found=low, hint=hint)


def _registered(function: NamedFunction) -> Problems:
    if wrong := [need for need in function.needs if need != OLD]:
        hint = f"its plugin registers it with needs = {_listed(wrong)}; known: {OLD!r}"
        yield ConfigProblem(path="algorithm.correction", found=function.name, hint=hint)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
