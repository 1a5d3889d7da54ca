"""Live display of a run on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from anygauge.config import Config
from anygauge.observability.progress_view import ProgressView

if TYPE_CHECKING:
    from rich.console import Console, Group

    from anygauge_hooks.types import RunInfo

__all__ = ["LiveProgress"]

_LABELS = {"train/train_rollout_logprob_abs_diff": "log-prob diff", "perf/tokens_per_s": "tokens/s"}
"""Metrics that are shown besides those of a line."""
_REWARD = "rollout/raw_reward"
_BESTS = 2
"""Most best scores that are shown."""


class LiveProgress:
    """Lines at the bottom of a terminal, redrawn twice a second.

    :param run: The run before its first step.
    :param clock: Seconds, as ``time.monotonic``.
    """

    def __init__(self, run: RunInfo, console: Console, clock: Callable[[], float]) -> None:
        from rich.live import Live

        self._clock = clock
        self._began = clock()
        self._ends: float | None = None
        self._best: dict[str, tuple[float, int]] = {}
        self._evaluated = run.step or None
        self._view = ProgressView(run.name, run.step, run.total_steps, self._next_phase(run))
        self._view.tail = [f"on {run.backend}"]
        self._live = Live(
            get_renderable=lambda: self._lines(console.width), console=console, refresh_per_second=2
        )
        self.start, self.stop = self._live.start, self._live.stop

    def step(
        self,
        run: RunInfo,
        metrics: Mapping[str, float],
        labels: Mapping[str, str],
        step_s: float,
        left_s: float,
    ) -> None:
        """Show a step.

        :param labels: Labels of the metrics that are shown first.
        :param step_s: Seconds that it took.
        :param left_s: Seconds that the rest of the run takes.
        """
        named = {**labels, **_LABELS}
        shown = {label: metrics[name] for name, label in named.items() if name in metrics}
        self._view.step, self._view.values = run.step, {**shown, "s/step": step_s}
        self._ends = self._clock() + left_s
        if _REWARD in metrics and self._evaluated is None:
            self._note_best("reward", metrics[_REWARD], run.step)
        self._view.tail = self._bests()
        self.enter(self._next_phase(run))

    def evaluated(self, run: RunInfo, results: Sequence[tuple[str, float]]) -> None:
        """Take note of an evaluation, whose scores and losses come before all else."""
        if self._evaluated is None:
            self._best.clear()
        self._evaluated = run.step
        for name, value in results:
            self._note_best(name, value, run.step)
        self._view.tail = self._bests()
        self.enter(self._next_phase(run))

    def enter(self, phase: str) -> None:
        """Show what the run does now."""
        self._view.phase = phase
        self._live.refresh()

    def _next_phase(self, run: RunInfo) -> str:
        """Return what follows the last step, or its evaluation."""
        if self._evaluated != run.step and _evaluates(run):
            return "evaluating"
        if run.step >= run.total_steps:
            return "finishing"
        return "rollout" if run.config.run.task == "rl" else "training"

    def _note_best(self, name: str, value: float, step: int) -> None:
        sign = -1 if name.endswith("-loss") else 1
        if name not in self._best or sign * value > sign * self._best[name][0]:
            self._best[name] = (value, step)

    def _bests(self) -> list[str]:
        best = list(self._best.items())[:_BESTS]
        return [f"best {name} {value:.4g} at step {step}" for name, (value, step) in best]

    def _lines(self, width: int) -> Group:
        from rich.console import Group

        now = self._clock()
        left_s = None if self._ends is None else max(self._ends - now, 0.0)
        return Group(*self._view.lines(width, now - self._began, left_s))


def _evaluates(run: RunInfo) -> bool:
    """Return whether the run waits for an evaluation at its step."""
    config = run.config
    if not isinstance(config, Config) or not (config.eval.data or config.eval.datasets):
        return False
    waits = config.eval.wait or config.rollout.schedule == "sync"
    return run.step == run.total_steps or (waits and run.step % config.eval.interval == 0)
