"""Health rules: conditions that end a run, or warn about it.

There is one so far: trainer and rollout engine must agree about the log-probs of the same tokens under the
same weights. Where they differ by more than rounding, they have different models: what is trained is not what
generates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from anygauge.algorithms.on_policy import ON_POLICY
from anygauge.config import Config
from anygauge.config.rules.health import computing_dtype, logprob_limits
from anygauge.observability.health import HealthEvent, append_event
from anygauge_hooks.errors import HealthError

__all__ = ["HealthMonitor", "health_metrics"]

LOGPROB_DIFF = "logprob_abs_diff"
_log = logging.getLogger(__name__)


CAUSES = """\
Usual causes: a model plugin whose layers differ from the checkpoint's, weights that did not reach the engine,
  another temperature, an engine with quantized weights (fp8), experts that the two route differently (MoE).
  docs/debugging.md says how to find out. To go on anyway, raise health.logprob_abs_diff_error or set it to
  "none"; a run that has a checkpoint goes on with --resume."""


def health_metrics(first: Mapping[str, float]) -> dict[str, float]:
    """Return ``health/*`` of a rollout, from what its first optimizer step reports.

    There are none where no sample is wholly of the weights being trained: in replays, in SFT, and in
    asynchronous steps all of whose samples are older.
    """
    difference, tokens = (first.get(name, 0.0) for name in ON_POLICY)
    return {f"health/{LOGPROB_DIFF}": difference / tokens} if tokens else {}


class HealthMonitor:
    """Looks at the metrics of each step; what it finds goes to the log and to ``health.jsonl``."""

    def __init__(self, config: Config, directory: Path) -> None:
        self._limits = logprob_limits(config)
        self._precision = computing_dtype(config)
        self._directory = directory
        self._is_warned = False
        """Whether the step before broke the rule: the terminal is told once, and not at every step."""

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Warn of what is beyond its limit.

        :raises HealthError: It is so far beyond that the run must not go on.
        """
        value = metrics.get(f"health/{LOGPROB_DIFF}")
        if value is None:
            return
        if _is_above(value, self._limits.error):
            event = self._event(step, "error", value, self._limits.error)
            raise HealthError(event.text, hint=CAUSES)
        is_bad = _is_above(value, self._limits.warning)
        if is_bad:
            event = self._event(step, "warning", value, self._limits.warning)
            _log.log(logging.INFO if self._is_warned else logging.WARNING, "%s", event.text)
        self._is_warned = is_bad

    def _event(
        self, step: int, level: Literal["warning", "error"], value: float, limit: float | None
    ) -> HealthEvent:
        assert limit is not None
        text = (
            f"Step {step}: trainer and rollout engine disagree about the log-probs of the same tokens under "
            f"the same weights: their mean absolute difference is {value:.3g}, above "
            f"health.{LOGPROB_DIFF}_{level} = {limit:g} ({self._precision})."
        )
        event = HealthEvent(
            step=step,
            level=level,
            rule=LOGPROB_DIFF,
            value=value if math.isfinite(value) else None,
            limit=limit,
            text=text,
        )
        append_event(self._directory, event)
        return event


def _is_above(value: float, limit: float | None) -> bool:
    """Return whether a value is above a limit, or no number at all."""
    return limit is not None and not value <= limit
