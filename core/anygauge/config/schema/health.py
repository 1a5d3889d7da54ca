"""Limits of metrics that show whether a run still works."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from anygauge.config.schema.section import Section

__all__ = ["Health"]

Limit = Annotated[float, Field(gt=0)]


class Health(Section):
    """Health rules, checked after each step."""

    logprob_abs_diff_warning: Limit | Literal["auto"] | None = "auto"
    """Warn where the mean absolute difference of the trainer's and the rollout engine's log-probs, the metric
    ``health/logprob_abs_diff``, is above this. ``auto`` is 1e-4, or 0.15 if one of the two computes in
    bfloat16; ``None`` never warns. Tokens of older weights do not count."""
    logprob_abs_diff_error: Limit | Literal["auto"] | None = "auto"
    """End the run where it is above this. ``auto`` is 1e-3, or 0.3 if one of the two computes in bfloat16;
    ``None`` never ends it."""
