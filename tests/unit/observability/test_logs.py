"""``driver.log``: who writes to it, how a run starts and ends in it, and that nothing is left behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from anygauge.observability.logs import driver_log, summary
from anygauge_hooks.errors import CheckpointError, DataError

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (INFO|WARNING|ERROR) [\w.]+: .")


def events(path: Path) -> list[str]:
    """Return the events of a log: lines that are not indented, each with a time."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("    ")]
    assert all(LINE.match(line) for line in lines), lines
    return [line.split(": ", 1)[1] for line in lines]


def test_a_run_has_a_first_and_a_last_line(tmp_path: Path) -> None:
    with driver_log(tmp_path, backend="cpu") as path:
        logging.getLogger("anygauge.trainer.loop").info("step %d", 1)
    assert path == tmp_path / "logs/driver.log"
    first, command, step, last = events(path)
    assert first.startswith("anygauge ")
    assert f"backend cpu, pid {os.getpid()} on " in first
    assert str(Path.cwd()) in command
    assert sys.executable in command
    assert step == "step 1"
    assert re.fullmatch(r"done after \d+\.\d s", last)


def test_the_core_is_heard_from_info_on_and_others_from_warning_on(tmp_path: Path) -> None:
    with driver_log(tmp_path, backend="cpu") as path:
        logging.getLogger("anygauge.engines").info("ours")
        logging.getLogger("anygauge.engines").debug("too quiet")
        logging.getLogger("somebody").info("theirs")
        logging.getLogger("somebody").warning("their warning")
    assert events(path)[2:-1] == ["ours", "their warning"]


def test_warnings_are_written_and_shown(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with driver_log(tmp_path, backend="cpu") as path:
            warnings.warn("mind the gap", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["mind the gap"]
    assert events(path)[2].endswith("UserWarning: mind the gap")


def test_an_error_is_written_with_its_traceback_and_its_cause(tmp_path: Path) -> None:
    with pytest.raises(DataError), driver_log(tmp_path, backend="cpu") as path:
        raise DataError("a row cannot be used", hint="mend it") from KeyError("answer")
    assert events(path)[-1].startswith("failed after ")
    text = path.read_text()
    assert "    Traceback (most recent call last):" in text
    assert "KeyError: 'answer'" in text
    assert text.rstrip().endswith("[AG301]")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_stop_is_told_from_a_failure(tmp_path: Path, stop: type[BaseException]) -> None:
    with pytest.raises(stop), driver_log(tmp_path, backend="cpu") as path:
        raise stop
    assert re.fullmatch(rf"stopped after \d+\.\d s: {stop.__name__}", events(path)[-1])


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    root, ours = logging.getLogger(), logging.getLogger("anygauge")
    before = root.handlers[:], ours.level, warnings.showwarning, signal.getsignal(signal.SIGUSR1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with driver_log(tmp_path, backend="cpu"):
        assert (root.handlers, ours.level, warnings.showwarning) != before[:3]
    assert (root.handlers[:], ours.level, warnings.showwarning, signal.getsignal(signal.SIGUSR1)) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_later_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        with driver_log(tmp_path, backend="cpu") as path:
            pass
    assert [event.split()[0] for event in events(path)] == ["anygauge", "in", "done"] * 2


def test_a_full_disk_does_not_hide_what_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/driver.log").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="the last good") as ended, driver_log(tmp_path, backend="cpu"):
        raise CheckpointError("No space left on device; the last good one is step-00000020.")
    assert ended.value.__context__ is None
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{tmp_path}/logs/driver.log cannot be written, and lines of it are lost: "
        "[Errno 28] No space left on device"
    ]
    assert "Traceback" not in capfd.readouterr().err


def test_a_signal_adds_the_stacks(tmp_path: Path) -> None:
    with driver_log(tmp_path, backend="cpu") as path:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert "test_a_signal_adds_the_stacks" in path.read_text()


def test_the_line_of_an_evaluation_has_its_results_alone() -> None:
    details = dict.fromkeys(("truncated_ratio", "failed_ratio", "samples"), 1.0)
    metrics = {f"eval/math-{name}": value for name, value in details.items()}
    metrics |= {"eval/step": 20, "eval/math/response_len/mean": 9.0, "eval/math": 0.25, "eval/math-loss": 2.0}
    assert summary(metrics) == "eval/math 0.25, eval/math-loss 2"


def test_a_worker_says_when_and_who() -> None:
    code = (
        "import logging; from anygauge.observability.logs import log_worker; log_worker('actor', 3);"
        "logging.getLogger('anygauge.engines').info('ready');"
        "logging.getLogger('anygauge_npu.device').info('ready');"  # a backend's: no child of the core's
        "logging.getLogger('another.library').info('noise')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    line = r"[-\d]+ [:\d]+\.\d{3} INFO \[actor-3\] anygauge%s: ready\n"
    assert re.fullmatch(line % r"\.engines" + line % r"_npu\.device", done.stderr)
