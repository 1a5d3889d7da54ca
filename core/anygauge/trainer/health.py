"""Health of a run: judges each step, warns of what changes, and ends the run where a rule says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from anygauge.algorithms.on_policy import ON_POLICY
from anygauge.config import Config
from anygauge.config.rules.health import health_limits, logprob_error
from anygauge.health.record import HEALTH_FILE, health_of, write_health
from anygauge.health.rules import RULES, RuleName
from anygauge.health.watch import Change, watch_rules
from anygauge.observability.jsonl import METRICS_FILE
from anygauge.observability.report.metrics_file import read_metrics
from anygauge_hooks.errors import HealthError

__all__ = ["HealthMonitor", "health_metrics"]

LOGPROB_DIFF = "health/logprob_abs_diff"
_log = logging.getLogger(__name__)


CAUSES = """\
Usual causes: a model plugin whose layers differ from the checkpoint's, weights that did not reach the engine,
  another temperature, an engine with quantized weights (fp8), experts that the two route differently (MoE).
  docs/debugging.md says how to find out. To go on anyway, raise health.logprob_abs_diff_error or set it to
  "none"."""
STOPPED = """\
run.stop_on names {name}. docs/health.md explains the rule. To go on anyway, take it out of run.stop_on or
  raise {key}."""


def health_metrics(first: Mapping[str, float]) -> dict[str, float]:
    """Return ``health/*`` of a rollout, from what its first optimizer step reports.

    There are none where no sample is wholly of the weights being trained: in replays, in SFT, and in
    asynchronous steps all of whose samples are older.
    """
    difference, tokens = (first.get(name, 0.0) for name in ON_POLICY)
    return {LOGPROB_DIFF: difference / tokens} if tokens else {}


class HealthMonitor:
    """Looks at the metrics of each step. Changes go to the log, the state of all rules to ``health.json``.

    :param step: Last step of an earlier part of the run, whose metrics are in the run directory.
    """

    def __init__(self, config: Config, directory: Path, step: int = 0) -> None:
        self._stop_on = config.run.stop_on
        self._error = logprob_error(config)
        self._watch = watch_rules(health_limits(config))
        self._directory = directory
        self._changes: list[Change] = []
        if step:
            self._replay(step)
            self._write(step, None)  # replaces the state in which the earlier part ended

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """Judge a step.

        :raises HealthError: The run must not go on.
        """
        changes = self._watch.step(step, metrics)
        self._changes += changes
        stop = self._disagreement(metrics, step) or self._wanted_stop()
        for change in changes:
            if not (stop and change.rule == stop[0]):  # the error says the same
                _log.warning("%s", change.text)
        self._write(step, stop[0] if stop else None)
        if stop:
            raise stop[1]

    def _disagreement(self, metrics: Mapping[str, float], step: int) -> tuple[RuleName, HealthError] | None:
        """Return the error of trainer and engine that are too far apart."""
        value, limit = metrics.get(LOGPROB_DIFF), self._error
        rule = next(rule for rule in RULES if rule.name == "logprob_abs_diff")
        if value is None or limit.value is None or not rule.is_beyond(value, limit.value):
            return None
        return rule.name, HealthError(f"Step {step}: {limit.broken_by(rule, value)}", hint=CAUSES)

    def _wanted_stop(self) -> tuple[RuleName, HealthError] | None:
        """Return the error of a rule that fires and that the user wants to end the run."""
        for watch in self._watch.watches:
            if watch.since is not None and watch.rule.name in self._stop_on:
                hint = STOPPED.format(name=watch.rule.name, key=watch.limit.key)
                return watch.rule.name, HealthError(watch.text, hint=hint)
        return None

    def _write(self, step: int, stopped_by: RuleName | None) -> None:
        try:
            write_health(self._directory, health_of(self._watch, step, self._changes, stopped_by))
        except OSError as error:
            _log.warning("%s of %s cannot be written: %s", HEALTH_FILE, self._directory, error)

    def _replay(self, last: int) -> None:
        """Judge the steps of an earlier part of the run again, in silence."""
        path = self._directory / METRICS_FILE
        for row in read_metrics(path).rows() if path.is_file() else ():
            step = row.pop("step")
            if 0 < step <= last:
                self._changes += self._watch.step(int(step), row)
