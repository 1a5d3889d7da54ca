"""Rules of ``[health]``: which limits apply to a run, and which contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from anygauge.config.schema import Config
from anygauge.health.rules import RULES, Limit, RuleName
from anygauge_hooks.types import ConfigProblem

__all__ = ["Limits", "computing_dtype", "health_limits", "health_rule", "logprob_error", "logprob_limits"]

LOGPROB: RuleName = "logprob_abs_diff"


@dataclass(frozen=True, slots=True)
class Limits:
    """Above which a number is warned of, and ends the run; ``None`` never does."""

    warning: float | None
    error: float | None


WITHOUT_GROUPS = ("reinforce_plus_plus", "on_policy_distillation")
"""Estimators that do not compare the samples of a prompt; with ``gae`` the rule takes all of a step."""
LOGPROBS = {"float32": Limits(1e-4, 1e-3), "bfloat16": Limits(0.15, 0.3)}
"""Far above rounding: correct models differ by 1e-6 in float32, and even random weights of 4B parameters by
no more than 0.09 in bfloat16."""


def health_limits(config: Config) -> dict[RuleName, Limit]:
    """Return the limit of each rule: the configured one, the schedule's, or that of the table."""
    own, found = config.health.limits, dict[RuleName, Limit]()
    for rule in RULES:
        note, value = "", rule.limit
        if rule.name == "stale_weights":
            note, value = f'rollout.schedule = "{config.rollout.schedule}"', oldest_weights(config)
        if rule.name == "no_signal" and learns_without_groups(config):
            note, value = f'algorithm.advantage = "{config.algorithm.advantage}"', None
        if rule.name in own:
            note, value = "", own[rule.name]
        found[rule.name] = Limit(value, f"health.limits.{rule.name}", note)
    limits, error = logprob_limits(config), logprob_error(config)
    found[LOGPROB] = Limit(limits.warning, f"health.{LOGPROB}_warning", computing_dtype(config))
    if error.value is not None and (limits.warning is None or error.value < limits.warning):
        found[LOGPROB] = error
    return found


def logprob_error(config: Config) -> Limit:
    """Return the limit of the log-prob difference that ends the run."""
    return Limit(logprob_limits(config).error, f"health.{LOGPROB}_error", computing_dtype(config))


def logprob_limits(config: Config) -> Limits:
    """Return the configured limits, or the defaults for the lower precision of trainer and engine."""
    usual, own = LOGPROBS[computing_dtype(config)], config.health
    warning, error = own.logprob_abs_diff_warning, own.logprob_abs_diff_error
    return Limits(
        usual.warning if warning == "auto" else warning,
        usual.error if error == "auto" else error,
    )


def oldest_weights(config: Config) -> float | None:
    """Return by how many versions the schedule lets tokens be older than the trained weights."""
    rollout = config.rollout
    if rollout.schedule == "async":
        return float(rollout.max_staleness)
    if rollout.schedule == "one_step_off":
        return 1.0
    return None if rollout.partial_rollout else 0.0


def learns_without_groups(config: Config) -> bool:
    """Return whether groups of equal rewards teach: by a teacher, or beside those of other prompts."""
    algorithm = config.algorithm
    return algorithm.advantage in WITHOUT_GROUPS or algorithm.distill_kl_coef > 0


def computing_dtype(config: Config) -> str:
    """Return the lower precision of trainer and rollout engine."""
    trainer = config.train.dtype or "float32"
    return "bfloat16" if "bfloat16" in (trainer, config.rollout.dtype or trainer) else "float32"


def health_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield limits that have no effect or are no fraction, and rules that would stop the run but are off."""
    yield from _percentages(config)
    warning, limits = config.health.logprob_abs_diff_warning, logprob_limits(config)
    if isinstance(warning, float) and limits.error is not None and warning > limits.error:
        hint = (
            f"never warns: the run ends above health.logprob_abs_diff_error = {limits.error:g} "
            f"({computing_dtype(config)}); raise that too, or write a limit below it"
        )
        yield ConfigProblem(path="health.logprob_abs_diff_warning", found=warning, hint=hint)
    if LOGPROB in config.health.limits:
        hint = f"has keys of its own: health.{LOGPROB}_warning and health.{LOGPROB}_error"
        yield ConfigProblem(path=f"health.limits.{LOGPROB}", found=config.health.limits[LOGPROB], hint=hint)
    for name, limit in health_limits(config).items():
        if name in config.run.stop_on and limit.value is None:
            hint = f"{name!r} never fires: {limit.key} is off; set it, or leave the rule out"
            yield ConfigProblem(path="run.stop_on", found=list(config.run.stop_on), hint=hint)


def _percentages(config: Config) -> Iterator[ConfigProblem]:
    """Yield limits of fractions above 1: percentages, which no run would reach."""
    fractions = {rule.name for rule in RULES if rule.unit == "fraction"}
    for name, limit in config.health.limits.items():
        if name in fractions and limit is not None and limit > 1:
            hint = f"is a fraction from 0 to 1: {limit:g} % is {limit / 100:g}"
            yield ConfigProblem(path=f"health.limits.{name}", found=limit, hint=hint)
