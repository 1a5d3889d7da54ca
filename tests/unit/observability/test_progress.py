"""Progress display: lines without a terminal, a bar with time left on one, nothing left behind."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from anygauge.config import Config
from anygauge.observability import plugin
from anygauge.observability.live_progress import LiveProgress
from anygauge.observability.progress import RunProgress
from anygauge.observability.terminal_warnings import terminal_handler
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.types import RunInfo

METRICS = {
    "rollout/raw_reward": 0.53125,
    "rollout/reward": 0.25,
    "rollout/response_len/mean": 31.25,
    "train/loss": -1.2e-9,
    "train/entropy_loss": 2.0,
    "train/grad_norm": 0.0123456,
}
SHOWN = "reward 0.5312  length 31.25  entropy 2  grad norm 0.01235"


@pytest.fixture
def run() -> RunInfo:
    config = Config.model_validate(
        {
            "run": {"name": "demo"},
            "model": {"path": "m"},
            "data": {"train": ["t.jsonl"]},
            "reward": {"function": "math"},
        }
    )
    return RunInfo(name="demo", directory="/nowhere", backend="cpu", total_steps=4, config=config)


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the terminal that runs the tests out of them."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def threads() -> Iterator[None]:
    """Fail if a thread that the test started goes on after it."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


def ticks(*seconds: float) -> Iterator[float]:
    """Return a clock's readings; the last one stays."""
    yield from seconds
    while True:
        yield seconds[-1]


def progress_on(output: io.StringIO, *seconds: float, terminal: bool = False) -> RunProgress:
    clock = ticks(*seconds)
    return RunProgress(
        lambda: Console(file=output, force_terminal=terminal, width=160),
        lambda: next(clock),
    )


def test_lines_without_a_terminal(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0, 60.0, 60.0, 100.0, 100.0, 4000.0)
    progress.before_train(run)
    progress.after_train_step(replace(run, step=1), METRICS)
    progress.after_train_step(replace(run, step=2), METRICS)
    progress.after_train(replace(run, step=4))
    assert output.getvalue().splitlines() == [
        "run demo: 4 steps on backend cpu",
        f"step 1/4  {SHOWN}  60 s/step  3:00 left",
        f"step 2/4  {SHOWN}  40 s/step  1:20 left",
        "run demo: 4 steps in 1:06:40",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_line_has_what_is_known_of_the_devices(
    run: RunInfo, output: io.StringIO, threads: None, terminal: bool
) -> None:
    progress = progress_on(output, 0, 1, terminal=terminal)
    progress.before_train(run=replace(run, devices="2 x abacus"))
    progress.after_train(run=run)
    assert "run demo: 4 steps on backend cpu (2 x abacus)\n" in output.getvalue()


def test_evaluations_have_a_line_and_are_not_in_the_step_time(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0, 50.0, 60.0)
    progress.before_train(run)
    progress.after_evaluate(
        run,
        {
            "eval/gsm8k": 0.25,
            "eval/gsm8k-truncated_ratio": 0.5,
            "eval/gsm8k-failed_ratio": 0.0,
            "eval/gsm8k-samples": 512,
            "eval/gsm8k-loss": 1.5,
            "eval/gsm8k/response_len/mean": 9.0,
            "eval/aime-24": 0.125,
            "passrate/gsm8k-pass@1": 0.25,
            "passrate/aime-24-pass@1": 0.125,
            "passrate/aime-24-pass@8": 0.5,
            "passrate/aime-24-pass@16": 0.625,
            "eval/step": 0,
        },
    )
    progress.after_train_step(replace(run, step=1), {})
    assert output.getvalue().splitlines()[1:] == [
        "eval at step 0  gsm8k 0.25  gsm8k-loss 1.5  aime-24 0.125  aime-24 pass@16 0.625",
        "step 1/4  10 s/step  3:00 left",
    ]


def test_time_left_of_a_resumed_run_counts_its_own_steps(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0, 7.0)
    progress.before_train(replace(run, step=2))
    progress.after_train_step(replace(run, step=3), {})
    assert output.getvalue().splitlines()[-1] == "step 3/4  7 s/step  0:07 left"


def test_the_bar_on_a_terminal(run: RunInfo, output: io.StringIO, threads: None) -> None:
    progress = progress_on(output, 0.0, 0.0, 2.0, terminal=True)
    progress.before_train(run)
    progress.after_evaluate(run, {"eval/gsm8k": 0.25})
    progress.after_train_step(replace(run, step=1), METRICS)
    progress.after_train(replace(run, step=1))
    text = output.getvalue()
    for part in ("demo", "1/4", "reward  0.5312", "s/step", "eval at step 0  gsm8k 0.25", "left"):
        assert part in text
    assert text.endswith("run demo: 1 step in 0:02\n")


def test_the_bar_can_be_switched_off(run: RunInfo, output: io.StringIO) -> None:
    config = run.config.model_copy(update={"run": run.config.run.model_copy(update={"progress": False})})
    progress = progress_on(output, 0.0, terminal=True)
    progress.before_train(replace(run, config=config))
    assert output.getvalue() == "run demo: 4 steps on backend cpu\n"


def test_an_error_takes_the_bar_away_first(run: RunInfo, output: io.StringIO, threads: None) -> None:
    progress = progress_on(output, 0.0, 854.0, terminal=True)
    progress.before_train(run)
    progress.on_error(replace(run, step=1), RolloutError("no memory"))
    line = "run demo: stopped after 1 of 4 steps and 14:14 by RolloutError; nothing was saved\n"
    assert output.getvalue().endswith(line)
    progress.after_train(replace(run, step=1))
    assert output.getvalue().endswith(line)


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), SystemExit(143)])
def test_a_signal_before_a_checkpoint_leaves_nothing(
    run: RunInfo, output: io.StringIO, signal: BaseException
) -> None:
    progress = progress_on(output, 0.0, 5.0)
    progress.before_train(run)
    progress.on_error(replace(run, step=3), signal)
    progress.after_train(replace(run, step=3))
    assert output.getvalue().splitlines()[1:] == [
        "run demo: stopped after 3 of 4 steps and 0:05; nothing was saved"
    ]


def test_an_error_after_an_export_names_it(run: RunInfo, output: io.StringIO, tmp_path: Path) -> None:
    run = replace(run, directory=str(tmp_path), step=4)
    progress = progress_on(output, 0.0)
    progress.before_train(run)
    progress._saved_step = 0
    for name in ("hf-step-2", "hf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    os.utime(tmp_path / "hf-step-2" / "config.json", (1, 1))
    progress.on_error(run, RolloutError("no checkpoint"))
    assert output.getvalue().endswith(f"; no checkpoint was saved, but the model is in {tmp_path}/hf\n")


def test_an_error_says_where_the_run_can_be_resumed(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0, 5.0)
    progress.before_train(run)
    progress.after_save_checkpoint(replace(run, step=1), "/runs/demo/checkpoints/step-00000001")
    progress.after_save_checkpoint(replace(run, step=3), "/runs/demo/checkpoints/step-00000002")
    progress.on_error(replace(run, step=3), RolloutError("no memory"))
    assert output.getvalue().splitlines()[1:] == [
        "run demo: stopped after 3 of 4 steps and 0:05 by RolloutError; resume with --resume from step 2"
    ]


def test_a_resumed_run_can_be_resumed_again(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0)
    progress.before_train(replace(run, step=2))
    progress.on_error(replace(run, step=3), KeyboardInterrupt())
    assert output.getvalue().endswith("resume with --resume from step 2\n")


def test_a_checkpoint_without_a_number_is_of_the_last_step(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0)
    progress.before_train(run)
    progress.after_save_checkpoint(replace(run, step=3), "/somewhere/latest")
    progress.on_error(replace(run, step=3), KeyboardInterrupt())
    assert output.getvalue().endswith("from step 3\n")


def test_sft_shows_its_loss(run: RunInfo, output: io.StringIO) -> None:
    sft = run.config.model_copy(update={"run": run.config.run.model_copy(update={"task": "sft"})})
    progress = progress_on(output, 0.0, 2.0)
    progress.before_train(run)
    progress.after_train_step(replace(run, step=1, config=sft), {"train/loss": 0.5, "train/grad_norm": 1.5})
    assert output.getvalue().splitlines()[-1] == "step 1/4  loss 0.5  grad norm 1.5  2 s/step  0:06 left"


def test_a_run_that_never_began_shows_nothing(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0)
    progress.on_error(run, RolloutError("no memory"))
    progress.after_train(run)
    assert output.getvalue() == ""


def test_a_resumed_run_says_so_and_counts_its_own_steps(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0, 2.0)
    progress.before_train(replace(run, step=2))
    progress.after_train(replace(run, step=4))
    assert output.getvalue().splitlines() == [
        "run demo: resumed at step 2 of 4 on backend cpu",
        "run demo: steps 3 to 4 in 0:02",
    ]


@pytest.mark.parametrize(("step", "steps"), [(3, "no steps"), (4, "step 4")])
def test_the_last_part_of_a_run_may_be_short(
    run: RunInfo, output: io.StringIO, step: int, steps: str, threads: None
) -> None:
    progress = progress_on(output, 0.0, terminal=True)
    progress.before_train(replace(run, step=3))
    progress.after_train(replace(run, step=step))
    assert output.getvalue().startswith("run demo: resumed at step 3 of 4 on backend cpu\n")
    assert output.getvalue().endswith(f"run demo: {steps} in 0:00\n")


def test_a_run_off_a_terminal_has_a_line_every_so_many_steps(run: RunInfo, output: io.StringIO) -> None:
    settings = run.config.run.model_copy(update={"log_every": 5})
    run = replace(run, total_steps=12, config=run.config.model_copy(update={"run": settings}))
    progress = progress_on(output, 0.0)
    progress.before_train(replace(run, step=2))
    for step in range(3, 13):
        progress.after_train_step(replace(run, step=step), METRICS)
    assert [line.split()[1] for line in output.getvalue().splitlines()[1:]] == [
        "3/12",
        "5/12",
        "10/12",
        "12/12",
    ]


class Terminal(io.StringIO):
    """Keeps what a terminal is sent."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return what it shows, if it is wide enough."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\r\n\x1b]+", self.getvalue()):
            if part == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif part == "\r":
                column = 0
            elif part == "\x1b[1A":
                row -= 1
            elif part == "\x1b[2K":
                lines[row] = ""
            elif part[0] != "\x1b":  # else a color, or whether the cursor is shown
                line = lines[row].ljust(column)
                lines[row] = line[:column] + part + line[column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines]


def warn_below_a_display(
    run: RunInfo, console: Console, errors: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warn as the commands do, whose handler is older than the display."""
    monkeypatch.setattr(sys, "stderr", errors)
    handler = terminal_handler()
    progress = RunProgress(lambda: console, lambda: 0.0)
    progress.before_train(run)
    progress.after_rollout()
    handler.handle(logging.LogRecord("any", logging.WARNING, "", 1, "first\nsecond", None, None))
    progress.after_rollout()
    progress.after_train(run)
    assert sys.stderr is errors


def test_every_line_of_a_warning_is_above_the_display(
    run: RunInfo, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    warn_below_a_display(run, Console(file=terminal, width=80), terminal, monkeypatch)
    first, second, head, tail, *_ = terminal.lines()
    assert [first, second, tail] == ["WARNING: first", "second", "on cpu"]
    assert head.startswith("demo")
    assert head.endswith("training")


@pytest.mark.parametrize(("out", "errors"), [(Terminal, io.StringIO), (io.StringIO, Terminal)])
def test_a_warning_stays_on_standard_error_where_one_of_both_is_no_terminal(
    out: type[io.StringIO],
    errors: type[io.StringIO],
    run: RunInfo,
    threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console, stderr = Console(file=out(), width=80, force_terminal=True), errors()
    warn_below_a_display(run, console, stderr, monkeypatch)
    assert stderr.getvalue() == "WARNING: first\nsecond\n"


def screen(run: RunInfo, width: int, *steps: Callable[[LiveProgress], None]) -> list[str]:
    """Return the lines of a live display after some events, all of them in one moment."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=False, width=width)
    live = LiveProgress(run, console, lambda: 0.0)
    for step in steps:
        step(live)
    console.print(live._lines(width))
    return [line.rstrip() for line in output.getvalue().splitlines()]


LABELS = {"rollout/raw_reward": "reward", "train/grad_norm": "grad norm"}


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_display_needs_no_standard_error(
    is_closed: bool, run: RunInfo, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.close()
    monkeypatch.setattr(sys, "stderr", output if is_closed else None)
    assert screen(run, 80)[1] == "on cpu"


def test_a_display_fits_80_columns_and_numbers_keep_their_places(run: RunInfo) -> None:
    evaluated = run.config.model_copy(
        update={"eval": run.config.eval.model_copy(update={"data": ("held-out.jsonl",), "interval": 2})}
    )
    run = replace(run, total_steps=400, config=evaluated)

    def show(step: int, reward: float, norm: float) -> list[str]:
        metrics = {"rollout/raw_reward": reward, "train/grad_norm": norm, "perf/tokens_per_s": 4321.5}
        metrics["train/train_rollout_logprob_abs_diff"] = 1.25e-7
        return screen(
            run,
            80,
            lambda live: live.evaluated(run, [("held-out", 0.25)]),
            lambda live: live.step(replace(run, step=step), metrics, LABELS, 2.5, 75.0),
        )

    first, second = show(2, 0.5, 12.5), show(3, -0.0625, 0.0625)
    assert first == [
        "demo  " + "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 36 + "    2/400  0:00  1:15 left  evaluating",
        "reward  0.5000  grad norm  12.500  log-prob diff 1.2e-07  tokens/s   4,322",
        "s/step  2.5000  best held-out 0.25 at step 0",
    ]
    assert second[0].endswith("3/400  0:00  1:15 left  rollout")
    rollout = evaluated.rollout.model_copy(update={"schedule": "async"})
    own = evaluated.eval.model_copy(update={"wait": False})
    run = replace(run, config=evaluated.model_copy(update={"rollout": rollout, "eval": own}))
    assert show(2, 0.5, 12.5)[0].endswith("left  rollout")  # an evaluation that nobody waits for
    assert second[1] == "reward -0.0625  grad norm  0.0625  log-prob diff 1.2e-07  tokens/s   4,322"


def test_a_narrow_display_has_no_bar_and_every_number(run: RunInfo) -> None:
    metrics = {"rollout/raw_reward": 0.5, "train/grad_norm": 1e7}
    named = replace(run, name="a-run-whose-name-is-much-too-long")
    lines = screen(named, 50, lambda live: live.step(replace(named, step=1), metrics, LABELS, 2.5, 75.0))
    assert lines == [
        "a-run-whose-name-i\N{HORIZONTAL ELLIPSIS}  1/4  0:00  1:15 left  rollout",
        "reward  0.5000  grad norm 1.0e+07  s/step  2.5000",
        "best reward 0.5 at step 1",
    ]


@pytest.mark.parametrize(
    ("name", "width", "head"),
    [
        (
            "a-run-whose-name-is-much-too-long",
            44,
            "a-run-whose-\N{HORIZONTAL ELLIPSIS}  0/4  0:00  -:-- left  rollout",
        ),
        ("a-run", 29, "0/4  0:00  -:-- left  rollout"),
        ("训练运行的名字太长了", 44, "训练运行的名\N{HORIZONTAL ELLIPSIS}  0/4  0:00  -:-- left  rollout"),
        ("训练运行", 49, "训练运行  ━━━━━━━━  0/4  0:00  -:-- left  rollout"),
        ("训练运行", 48, "训练运行  0/4  0:00  -:-- left  rollout"),
    ],
)
def test_a_name_has_the_columns_that_the_step_the_time_and_the_phase_leave(
    run: RunInfo, name: str, width: int, head: str
) -> None:
    (shown, *_) = screen(replace(run, name=name), width)
    assert shown == head
    assert cell_len(shown) <= width


def test_labels_of_wide_characters_are_packed_by_their_columns(run: RunInfo) -> None:
    (_, *rows) = screen(
        run, 60, lambda live: live.evaluated(run, [("评测集合一", 0.5), ("评测集合二", 0.25)])
    )
    assert rows == ["best 评测集合一 0.5 at step 0", "best 评测集合二 0.25 at step 0"]


def test_a_resumed_display_says_that_its_best_scores_are_those_since(run: RunInfo) -> None:
    def step(number: int, reward: float) -> Callable[[LiveProgress], None]:
        return lambda live: live.step(replace(run, step=number), {"rollout/raw_reward": reward}, {}, 1.0, 1.0)

    rows = screen(replace(run, step=2), 80, step(3, 0.5), step(4, 0.25))
    assert rows[1].endswith("best reward 0.5 at step 3 since the resume")
    evals = run.config.eval.model_copy(update={"data": ("held-out.jsonl",), "interval": 2})
    run = replace(run, config=run.config.model_copy(update={"eval": evals}))
    resumed = replace(run, step=2)
    assert screen(resumed, 80)[0].endswith("left  rollout")  # step 2 was evaluated before
    assert screen(run, 80)[0].endswith("left  evaluating")
    assert "best" not in screen(resumed, 80, step(3, 0.5))[1]  # the training reward is no score of this run
    later = screen(
        resumed, 80, step(4, 0.5), lambda live: live.evaluated(replace(run, step=4), [("held-out", 0.25)])
    )
    assert later[1].endswith("best held-out 0.25 at step 4 since the resume")


def test_a_score_that_is_not_finite_is_never_the_best(run: RunInfo) -> None:
    def evaluate(number: int, score: float, loss: float) -> Callable[[LiveProgress], None]:
        results = [("a", score), ("a-loss", loss)]
        return lambda live: live.evaluated(replace(run, step=number), results)

    scores = (evaluate(1, math.nan, math.nan), evaluate(2, 0.5, 2.0), evaluate(3, math.inf, -math.inf))
    assert screen(run, 80, *scores)[1] == "best a 0.5 at step 2  best a-loss 2 at step 2"


def test_a_display_names_the_phase_and_the_best_scores(run: RunInfo) -> None:
    def step(number: int, reward: float) -> Callable[[LiveProgress], None]:
        metrics = {"rollout/raw_reward": reward}
        return lambda live: live.step(replace(run, step=number), metrics, {}, 1.0, 1.0)

    def evaluate(number: int, *results: tuple[str, float]) -> Callable[[LiveProgress], None]:
        return lambda live: live.evaluated(replace(run, step=number), results)

    assert screen(run, 80)[0].endswith("0/4  0:00  -:-- left  rollout")
    assert screen(run, 80, lambda live: live.enter("training"))[0].endswith("left  training")
    assert screen(run, 80, step(1, 0.5), step(2, 0.75), step(3, 0.25))[1].endswith(
        "best reward 0.75 at step 2"
    )
    scores = [evaluate(1, ("a", 0.5), ("a-loss", 2.0), ("b", 1.0)), evaluate(2, ("a", 0.25), ("a-loss", 1.5))]
    last = screen(run, 80, *scores, step(4, 0.9))
    assert last[0].endswith("left  finishing")
    assert last[1].endswith("best a 0.5 at step 1  best a-loss 1.5 at step 2")


@pytest.fixture(params=["a pipe without a reader", "a full disk"])
def broken_stdout(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """Return a standard output that cannot be written."""
    if request.param == "a full disk":
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full")
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, end = os.pipe()
        os.close(reader)
    with open(end, "w", encoding="utf-8") as stream:
        yield stream


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_outlives_its_standard_output(
    run: RunInfo,
    broken_stdout: TextIO,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    threads: None,
) -> None:
    monkeypatch.setattr("sys.stdout", broken_stdout)
    progress = RunProgress(lambda: Console(file=sys.stdout, force_terminal=terminal))
    progress.before_train(run)
    progress.after_train_step(replace(run, step=1), METRICS)
    progress.after_evaluate(run, {"eval/gsm8k": 0.25})
    progress.after_train_step(replace(run, step=2), METRICS)
    progress.after_train(replace(run, step=2))
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("the progress of the run is not shown any more: standard output: ")
    sys.stdout.write("what others print is lost, and no error")
    sys.stdout.flush()


def test_a_run_outlives_a_standard_output_that_is_closed(
    run: RunInfo, output: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    progress = progress_on(output, 0.0)
    progress.before_train(run)
    output.close()
    progress.after_train(run)
    assert "standard output: I/O operation on closed file" in caplog.text


def test_a_signal_while_a_line_is_printed_ends_the_run(run: RunInfo, output: io.StringIO) -> None:
    progress = progress_on(output, 0.0)
    progress.before_train(run)

    def write(text: str) -> int:
        raise SystemExit(143)

    output.write = write  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        progress.after_train_step(replace(run, step=1), METRICS)


def test_the_plugin_observes_with_its_hooks(run: RunInfo, capsys: pytest.CaptureFixture[str]) -> None:
    plugin.before_train(run=run)
    plugin.after_evaluate(run=run, metrics={"eval/gsm8k": 0.5})
    plugin.after_train_step(run=replace(run, step=1), metrics=METRICS)
    plugin.on_wait(run=replace(run, step=1), message="waiting for the checkpoint step-1")
    plugin.after_save_checkpoint(run=replace(run, step=1), path="step-1")
    plugin.on_error(run=replace(run, step=1), error=RolloutError("no memory"))
    plugin.after_train(run=replace(run, step=1))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "eval", "step", "waiting", "run"]


def test_report_environment() -> None:
    facts = plugin.report_environment()
    assert set(facts) == {"python", "platform", "cpus", "memory"}
    assert "usable of" in facts["cpus"]
    assert "GiB available of" in facts["memory"]


def test_what_starts_is_said_before_the_first_step(run: RunInfo, capsys: pytest.CaptureFixture[str]) -> None:
    plugin.on_wait(run=run, message="starting 1 training worker")
    plugin.before_train(run=run)
    plugin.after_train(run=run)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["starting", "run", "run"]


def test_each_start_is_said_on_the_output_of_its_time(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails before its run begins is no error of a run, and another may follow."""
    for _ in range(2):
        output = io.StringIO()
        monkeypatch.setattr(sys, "stdout", output)
        plugin.on_wait(run=run, message="starting 1 training worker")
        assert output.getvalue() == "starting 1 training worker\n"


def test_a_run_that_fails_to_start_has_no_summary(run: RunInfo, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        plugin.on_wait(run=run, message="starting 1 training worker")
        plugin.on_error(run=run, error=RolloutError("no memory"))
        plugin.after_train(run=run)
    assert capsys.readouterr().out == "starting 1 training worker\n" * 2


def test_a_notebook_gets_plain_lines(run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter sets FORCE_COLOR for its kernels, which makes rich take any stream for a terminal."""
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    progress = RunProgress(clock=ticks(0, 0, 1).__next__)
    progress.before_train(run)
    progress.after_train_step(replace(run, step=1), {"rollout/raw_reward": 0.5})
    assert "\x1b" not in output.getvalue()
    assert "step 1/" in output.getvalue()
