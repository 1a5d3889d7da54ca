"""Rules of ``[health]``: which limits apply to a run, and which contradict each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from anygauge.config.schema import Config
from anygauge_hooks.types import ConfigProblem

__all__ = ["Limits", "computing_dtype", "health_rule", "logprob_limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Above which a number is warned of, and ends the run; ``None`` never does."""

    warning: float | None
    error: float | None


DEFAULTS = {"float32": Limits(1e-4, 1e-3), "bfloat16": Limits(0.15, 0.3)}
"""Far above rounding: correct models differ by 1e-6 in float32, and even random weights of 4B parameters by
no more than 0.09 in bfloat16."""


def logprob_limits(config: Config) -> Limits:
    """Return the configured limits, or the defaults for the lower precision of trainer and engine."""
    usual, own = DEFAULTS[computing_dtype(config)], config.health
    warning, error = own.logprob_abs_diff_warning, own.logprob_abs_diff_error
    return Limits(
        usual.warning if warning == "auto" else warning,
        usual.error if error == "auto" else error,
    )


def computing_dtype(config: Config) -> str:
    """Return the lower precision of trainer and rollout engine."""
    trainer = config.train.dtype or "float32"
    return "bfloat16" if "bfloat16" in (trainer, config.rollout.dtype or trainer) else "float32"


def health_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield a warning that never comes, since the run ends first."""
    warning, limits = config.health.logprob_abs_diff_warning, logprob_limits(config)
    if isinstance(warning, float) and limits.error is not None and warning > limits.error:
        hint = (
            f"never warns: the run ends above health.logprob_abs_diff_error = {limits.error:g} "
            f"({computing_dtype(config)}); raise that too, or write a limit below it"
        )
        yield ConfigProblem(path="health.logprob_abs_diff_warning", found=warning, hint=hint)
