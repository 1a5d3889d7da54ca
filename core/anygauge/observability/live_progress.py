"""Live lines of a run on a terminal, laid out for its width."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from anygauge.config import Config
from anygauge.observability.control_characters import visible

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text

    from anygauge_hooks.types import RunInfo

__all__ = ["LiveProgress", "format_duration", "stable_number"]

_LABELS = {"train/train_rollout_logprob_abs_diff": "log-prob diff", "perf/tokens_per_s": "tokens/s"}
"""Metrics that are shown besides those of a line."""
_REWARD = "rollout/raw_reward"
_BESTS = 2
"""Most best scores that are shown."""
_BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"
_SHORTEST, _LONGEST = 8, 40
"""Columns of the bar; where there is less room, there is none."""
_GAP = "  "
_NAME = 24
"""Most columns of a run's name, which has no more than the step and the phase leave."""


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
        self._since = " since the resume" if run.step else ""
        # A run is evaluated before its first step, and a resumed one not before its next.
        self._evaluated_step = run.step or None
        self._run, self._phase = run, self._next_phase(run)
        self._values: Mapping[str, float] = {}
        self._tail = [f"on {run.backend}"]
        self._live = Live(
            get_renderable=lambda: self._lines(console.width),
            console=console,
            refresh_per_second=2,
            redirect_stderr=_are_both_terminals(console),
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
        self._run, self._values = run, {**shown, "s/step": step_s}
        self._ends = self._clock() + left_s
        if _REWARD in metrics and _evaluated_config(run) is None:
            self._note_best("reward", metrics[_REWARD], run.step)
        self._tail = self._bests()
        self.enter(self._next_phase(run))

    def evaluated(self, run: RunInfo, results: Sequence[tuple[str, float]]) -> None:
        """Take note of an evaluation, whose scores and losses come before all else."""
        self._evaluated_step = run.step
        for name, value in results:
            self._note_best(name, value, run.step)
        self._tail = self._bests()
        self.enter(self._next_phase(run))

    def enter(self, phase: str) -> None:
        """Show what the run does now."""
        self._phase = phase
        self._live.refresh()

    def _next_phase(self, run: RunInfo) -> str:
        """Return what follows the last step, or its evaluation."""
        if self._evaluated_step != run.step and _evaluates(run):
            return "evaluating"
        if run.step >= run.total_steps:
            return "finishing"
        return "rollout" if run.config.run.task == "rl" else "training"

    def _note_best(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            return
        sign = -1 if name.endswith("-loss") else 1
        if name not in self._best or sign * value > sign * self._best[name][0]:
            self._best[name] = (value, step)

    def _bests(self) -> list[str]:
        best = list(self._best.items())[:_BESTS]
        return [f"best {name} {value:.4g} at step {step}{self._since}" for name, (value, step) in best]

    def _lines(self, width: int) -> Group:
        """Return where the run is, and below it its numbers, which keep their width and their places."""
        from rich.console import Group
        from rich.text import Text

        items = [f"{label} {stable_number(value)}" for label, value in self._values.items()]
        rows = _packed([visible(item) for item in (*items, *self._tail)], width)
        return Group(self._head(width), *map(Text, rows))

    def _head(self, width: int) -> Text:
        from rich.text import Text

        rest = self._place()
        room = width - len(rest) - len(_GAP)
        if room < 1:  # the place and the time are in no other line
            return Text(rest, no_wrap=True, overflow="ellipsis")
        name = Text(visible(self._run.name), style="bold", no_wrap=True)
        name.truncate(min(room, _NAME), overflow="ellipsis")
        bar = min(room - name.cell_len - len(_GAP), _LONGEST)
        if bar >= _SHORTEST:
            done = round(bar * min(self._run.step / max(self._run.total_steps, 1), 1.0))
            name.append(_GAP, style="not bold").append(_BAR * done, style="not bold cyan")
            name.append(_BAR * (bar - done), style="not bold dim")
        return name.append(_GAP + rest, style="not bold")

    def _place(self) -> str:
        """Return the step, the time that the run took and still takes, and what it does now."""
        now, total = self._clock(), self._run.total_steps
        left = "-:--" if self._ends is None else format_duration(max(self._ends - now, 0.0))
        step = f"{self._run.step:>{len(str(total))}}/{total}"
        return _GAP.join([step, format_duration(now - self._began), f"{left} left", self._phase])


def _are_both_terminals(console: Console) -> bool:
    """Return whether standard error and the display are on a terminal, so that one would overwrite the other.

    Redirected to a file, standard error stays there. Nor is it sent to a pipe that the user declared a
    terminal, such as with ``FORCE_COLOR``: rich ends a program that prints to a pipe without a reader.
    """
    try:
        return sys.stderr.isatty() and console.file.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _evaluated_config(run: RunInfo) -> Config | None:
    """Return the config of a run that has evaluations; a plugin may make a run with a config of its own."""
    config = run.config
    if isinstance(config, Config) and (config.eval.data or config.eval.datasets):
        return config
    return None


def _evaluates(run: RunInfo) -> bool:
    """Return whether the run waits for an evaluation at its step."""
    config = _evaluated_config(run)
    if config is None:
        return False
    waits = config.eval.wait or config.rollout.schedule == "sync"
    return run.step == run.total_steps or (waits and run.step % config.eval.interval == 0)


def _packed(items: Sequence[str], width: int) -> Iterator[str]:
    """Yield rows with as many items as fit; an item alone may be wider."""
    from rich.cells import cell_len

    row = ""
    for item in items:
        longer = f"{row}{_GAP}{item}" if row else item
        if row and cell_len(longer) > width:
            yield row
            longer = item
        row = longer
    if row:
        yield row


def stable_number(value: float) -> str:
    """Return a number in seven characters, or eight with a sign, so that what follows it stays in place.

    >>> [stable_number(value) for value in (0.5, 31.25, 1234.5, 1.2e-7)]
    [' 0.5000', ' 31.250', '  1,234', '1.2e-07']
    """
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:7.1e}"
    if size >= 1000:
        return f"{value:7,.0f}"
    return f"{value:7.{4 - (size >= 10) - (size >= 100)}f}"


def format_duration(seconds: float) -> str:
    """Return a duration as ``1:05:09`` or ``5:09``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
