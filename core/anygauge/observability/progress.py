"""Progress of a run on standard output: live on a terminal, one line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from anygauge_hooks import hookimpl

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from anygauge_hooks.types import RunInfo

__all__ = ["RunProgress"]

_SHOWN = {
    "rollout/reward_mean": "reward",
    "rollout/response_length_mean": "length",
    "train/entropy": "entropy",
    "train/grad_norm": "grad norm",
}
"""Metrics of a step that are shown, with their labels.

Not the loss: with centred advantages and one optimizer step per rollout it is 0 but for rounding.
"""


def _stdout_console() -> Console:
    from rich.console import Console

    return Console(file=sys.stdout)


class RunProgress:
    """Follows one run at a time through its lifecycle hooks.

    :param make_console: Makes the console when a run starts; default: standard output.
    :param clock: Seconds, as ``time.monotonic``.
    """

    def __init__(
        self,
        make_console: Callable[[], Console] = _stdout_console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_console = make_console
        self._clock = clock
        self._console: Console | None = None
        self._live: Progress | None = None

    @hookimpl
    def before_train(self, run: RunInfo) -> None:
        """Start the display."""
        console = self._console = self._make_console()
        self._first_step = run.step
        self._started = self._step_started = self._clock()
        if console.is_terminal and run.config.run.progress:
            self._start_live(run, console)
        else:
            self._print(f"run {run.name}: {run.total_steps} steps on backend {run.backend}")

    @hookimpl
    def after_train_step(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        """Show a step's metrics, how long it took and how long the rest will take."""
        now = self._clock()
        shown = [f"{label} {metrics[name]:.4g}" for name, label in _SHOWN.items() if name in metrics]
        status = "  ".join([*shown, f"{now - self._step_started:.3g} s/step"])
        self._step_started = now
        if self._live is not None:
            self._live.update(self._task, completed=run.step, status=status)
        else:
            left = _duration(self._seconds_left(run))
            self._print(f"step {run.step}/{run.total_steps}  {status}  {left} left")

    @hookimpl
    def after_evaluate(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        """Show an evaluation, above the live display if there is one."""
        values = "  ".join(
            f"{name.removeprefix('eval/')} {value:.4g}"
            for name, value in sorted(metrics.items())
            if name != "eval/step"
        )
        self._print(f"eval at step {run.step}  {values}")
        self._step_started = self._clock()

    @hookimpl
    def on_error(self, run: RunInfo, error: BaseException) -> None:
        """Take the live display away before the error is printed, and say what is left of the run."""
        self._stop_live()
        if self._console is None:
            return
        # A signal is an exception only to this program, and the command names it.
        cause = f" by {type(error).__name__}" if isinstance(error, Exception) else ""
        elapsed = _duration(self._clock() - self._started)
        self._print(
            f"run {run.name}: stopped after {run.step} of {run.total_steps} steps and {elapsed}{cause}; "
            "no model was saved"
        )
        self._console = None

    @hookimpl
    def after_train(self, run: RunInfo) -> None:
        """End the display."""
        self._stop_live()
        if self._console is not None:
            self._print(f"run {run.name}: {run.step} steps in {_duration(self._clock() - self._started)}")
            self._console = None

    def _seconds_left(self, run: RunInfo) -> float:
        done = run.step - self._first_step
        per_step = (self._clock() - self._started) / max(done, 1)
        return per_step * (run.total_steps - run.step)

    def _start_live(self, run: RunInfo, console: Console) -> None:
        from rich import progress

        self._live = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[status]}"),
            console=console,
            refresh_per_second=2,
            speed_estimate_period=600,
        )
        self._task: TaskID = self._live.add_task(
            run.name, total=run.total_steps, completed=run.step, status=f"on {run.backend}"
        )
        self._live.start()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        """Print above the live display; nothing for a run that ended before it began."""
        if self._console is not None:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)


def _duration(seconds: float) -> str:
    """Return a duration as ``1:05:09`` or ``5:09``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
