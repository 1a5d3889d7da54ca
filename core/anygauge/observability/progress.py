"""Progress of a run on standard output: live on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.observability.control_characters import visible
from anygauge.observability.eval_names import EVAL_RESULT
from anygauge.observability.live_progress import LiveProgress, format_duration
from anygauge.wording import counted
from anygauge_hooks import hookimpl

if TYPE_CHECKING:
    from rich.console import Console

    from anygauge_hooks.types import RunInfo

__all__ = ["RunProgress"]

_SHOWN = {
    "rollout/raw_reward": "reward",
    "rollout/response_len/mean": "length",
    "train/entropy_loss": "entropy",
    "train/grad_norm": "grad norm",
}
"""Metrics of a step that are shown, with their labels.

Not the loss: with centered advantages and one optimizer step per rollout it is 0 but for rounding. SFT has
nothing else.
"""
_SHOWN_IN_SFT = {"train/loss": "loss", "train/grad_norm": "grad norm"}
_PASS = re.compile(r"passrate/(.+)-pass@(\d+)$")
_log = logging.getLogger(__name__)


def _stdout_console() -> Console:
    from rich.console import Console

    console = Console(file=sys.stdout)
    if console.is_jupyter:  # plain lines: a notebook sets FORCE_COLOR, which makes a terminal of anything
        return Console(file=sys.stdout, force_jupyter=False, force_terminal=False, color_system=None)
    return console


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
        self._live: LiveProgress | None = None
        self._has_begun = False

    @hookimpl
    def before_train(self, run: RunInfo) -> None:
        """Start the display."""
        self._has_begun = True
        console = self._console = self._make_console()
        self._first_step = self._saved_step = run.step
        self._started = self._step_started = self._first_step_ended = self._clock()
        if console.is_terminal and run.config.run.progress:
            if run.step or run.devices:
                self._print(_first_line(run))
            self._live = LiveProgress(run, console, self._clock)
            with self._display():
                self._live.start()
        else:
            self._print(_first_line(run))

    @hookimpl
    def after_train_step(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        """Show a step's metrics, how long it took and how long the rest will take."""
        now = self._clock()
        labels = _SHOWN if run.config.run.task == "rl" else _SHOWN_IN_SFT
        step_s, self._step_started = now - self._step_started, now
        if run.step == self._first_step + 1:
            self._first_step_ended = now
        if self._live is not None:
            with self._display():
                self._live.step(run, metrics, labels, step_s, self._seconds_left(run))
        elif self._is_logged(run):
            shown = [f"{label} {metrics[name]:.4g}" for name, label in labels.items() if name in metrics]
            line = "  ".join([f"step {run.step}/{run.total_steps}", *shown, f"{step_s:.3g} s/step"])
            self._print(f"{line}  {format_duration(self._seconds_left(run))} left")

    def _is_logged(self, run: RunInfo) -> bool:
        """Return whether a step has a line: the first one, the last one, and every so many."""
        is_end = run.step in (self._first_step + 1, run.total_steps)
        return is_end or run.step % run.config.run.log_every == 0

    @hookimpl
    def after_rollout(self) -> None:
        """Show that the samples of a step are there, and train."""
        if self._live is not None:
            with self._display():
                self._live.enter("training")

    @hookimpl
    def after_evaluate(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        """Show an evaluation, above the live display if there is one."""
        values = "  ".join(f"{label} {value:.4g}" for label, value in _eval_results(metrics))
        self._print(f"eval at step {run.step}  {values}")
        self._step_started = self._clock()
        if self._live is not None:
            scores = [match for name in metrics if (match := re.fullmatch(EVAL_RESULT, name))]
            with self._display():
                self._live.evaluated(run, [(match[1], metrics[match[0]]) for match in scores])

    @hookimpl
    def on_wait(self, run: RunInfo, message: str) -> None:
        """Say what the run waits for, above the live display if there is one."""
        if not self._has_begun:
            self._console = self._make_console()
        self._print(message)

    @hookimpl
    def after_save_checkpoint(self, run: RunInfo, path: str) -> None:
        """Remember where the run can be resumed; one that goes well needs no line for it."""
        number = re.search(r"\d+$", Path(path).name)
        self._saved_step = int(number[0]) if number else run.step

    @hookimpl
    def on_error(self, run: RunInfo, error: BaseException) -> None:
        """Remove the live display before the error is printed, and print a summary of the run."""
        self._stop_live()
        begun, self._has_begun = self._has_begun, False
        if self._console is None or not begun:
            self._console = None
            return
        # A signal is an exception only to this program, and the command names it.
        cause = f" by {type(error).__name__}" if isinstance(error, Exception) else ""
        elapsed = format_duration(self._clock() - self._started)
        left = (
            f"resume with --resume from step {self._saved_step}"
            if self._saved_step
            else _checkpoint_line(run)
        )
        done = f"stopped after {run.step} of {run.total_steps} steps and {elapsed}{cause}"
        self._print(f"run {run.name}: {done}; {left}")
        self._console = None

    @hookimpl
    def after_train(self, run: RunInfo) -> None:
        """End the display."""
        self._stop_live()
        if self._console is not None and self._has_begun:
            elapsed = format_duration(self._clock() - self._started)
            self._print(f"run {run.name}: {_steps(self._first_step, run.step)} in {elapsed}")
        self._console, self._has_begun = None, False

    def _seconds_left(self, run: RunInfo) -> float:
        """Return the time of the remaining steps. The first, which compiles and allocates, counts alone."""
        later = run.step - self._first_step - 1
        since = self._first_step_ended if later > 0 else self._started
        return (self._clock() - since) / max(later, 1) * (run.total_steps - run.step)

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with self._display():
                live.stop()

    def _print(self, line: str) -> None:
        """Print above the live display; nothing for a run that ended before it began."""
        if self._console is not None:
            with self._display():
                self._console.print(visible(line), soft_wrap=True, markup=False, highlight=False)

    @contextmanager
    def _display(self) -> Iterator[None]:
        """Go on without a display where standard output went away: it must not end a run."""
        try:
            yield
        except (OSError, ValueError) as error:  # a ValueError where the stream is closed
            self._give_up(str(error))
        except SystemExit as stop:
            # So rich takes it that the reader of a pipe has left; a signal exits with another status.
            if stop.code != 1:
                raise
            self._give_up("its reader has left")

    def _give_up(self, why: str) -> None:
        console, live = self._console, self._live
        self._console = self._live = None
        if console is None:
            return
        console.quiet = True
        _discard(console)
        if live is not None:
            with suppress(IndexError):  # of one that failed as it began
                live.stop()
        _log.warning("the progress of the run is not shown any more: standard output: %s", why)


def _discard(console: Console) -> None:
    """Send what is buffered for a broken output, and all that others print to it, to nowhere."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), console.file.fileno())


def _checkpoint_line(run: RunInfo) -> str:
    """Return the line about a run without a checkpoint, and its exports."""
    from anygauge.observability.report.run_files import last_export  # not needed to load the plugin

    export = last_export(Path(run.directory))
    return f"no checkpoint was saved, but the model is in {export}" if export else "nothing was saved"


def _first_line(run: RunInfo) -> str:
    begun = f"resumed at step {run.step} of {run.total_steps}" if run.step else _steps(0, run.total_steps)
    return f"run {run.name}: {begun} on backend {run.where}"


def _steps(first: int, last: int) -> str:
    """Return which steps a part of a run did."""
    if not first:
        return counted(last, "step")
    if last <= first:
        return "no steps"
    return f"step {last}" if last == first + 1 else f"steps {first + 1} to {last}"


def _eval_results(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the score and the loss of each data set, and the pass@k of the largest k."""
    for name, value in metrics.items():
        result = re.fullmatch(EVAL_RESULT, name)
        if result:
            yield result[1], value
    passes = [
        (int(match[2]), match[1], value) for name, value in metrics.items() if (match := _PASS.match(name))
    ]
    for k, dataset, value in passes:
        if k > 1 and k == max(each for each, of, _ in passes if of == dataset):
            yield f"{dataset} pass@{k}", value
