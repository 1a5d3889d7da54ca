"""Attacks on terminals and logs: control characters in texts of models, data, agents and servers."""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from anygauge.cli import doctor, main
from anygauge.cli.eval import print_table
from anygauge.observability import control_characters
from anygauge.observability.control_characters import visible
from anygauge.observability.logs import driver_log, log_worker
from anygauge.observability.progress import RunProgress
from anygauge.observability.terminal_warnings import terminal_handler
from anygauge.rollout.gateway.command import run_command
from anygauge.rollout.rewards.process import _print
from anygauge_hooks.errors import RolloutError
from anygauge_tests.scripted_gateway import chat_tokenizer, serve_script

HOSTILE = "\x1b]0;owned\x07\x1b[2K\rdone \x9b31m \u202egpj.exe\u2066 \u2028."
SHOWN = r"\x1b]0;owned\x07\x1b[2K\rdone \x9b31m \u202egpj.exe\u2066 \u2028."
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def assert_visible(text: str, times: int = 1) -> None:
    assert text.count(SHOWN) >= times, text
    assert not CONTROL.search(text)


@pytest.fixture
def doctor_does(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Return a function that makes the doctor command do something, whose exception hook is put back."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def doctor_does(work: Callable[[], Any]) -> None:
        def run(args: argparse.Namespace) -> int:
            work()
            return 0

        monkeypatch.setattr(doctor, "run", run)

    return doctor_does


@pytest.fixture
def raw_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with Python's format of warnings, which an earlier test may have replaced."""
    monkeypatch.setattr(warnings, "formatwarning", control_characters._format_warning)


def fail(error: Exception) -> None:
    raise error from ValueError(HOSTILE)


def logged(level: int = logging.WARNING) -> logging.LogRecord:
    """Return a record whose message, argument and traceback are hostile."""
    try:
        fail(ValueError(HOSTILE))
    except ValueError:
        return logging.LogRecord(HOSTILE, level, "", 0, "%s", (HOSTILE,), sys.exc_info())
    raise AssertionError


def test_text_keeps_its_lines_and_its_letters() -> None:
    text = "one\n\ttwo \u05d0\u0627 \U0001f600 \\x1b"
    assert visible(text) == text
    assert not CONTROL.search(visible("".join(map(chr, range(0x3000)))))


@pytest.mark.parametrize(("debug", "times"), [("0", 1), ("1", 2)])
def test_an_error_on_the_terminal(
    debug: str,
    times: int,
    doctor_does: Callable[[Callable[[], Any]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYGAUGE_DEBUG", debug)
    doctor_does(lambda: fail(RolloutError(HOSTILE)))
    assert main(["doctor"]) == 1
    assert_visible(capsys.readouterr().err, times)


def test_an_exception_that_nobody_catches(
    doctor_does: Callable[[Callable[[], Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    doctor_does(lambda: fail(KeyError("key")))
    with pytest.raises(KeyError) as caught:
        main(["doctor"])
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert_visible(capsys.readouterr().err)


def test_a_warning_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal_handler().handle(logged())
    assert_visible(capsys.readouterr().err, 3)


def warn() -> None:
    """Print a warning as Python does outside of tests."""
    sys.stderr.write(warnings.formatwarning(HOSTILE, UserWarning, HOSTILE, 1, HOSTILE))


@pytest.mark.usefixtures("raw_warnings")
def test_a_warning_of_python(
    doctor_does: Callable[[Callable[[], Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    doctor_does(warn)
    assert main(["doctor"]) == 0
    assert_visible(capsys.readouterr().err, 3)


@pytest.mark.usefixtures("raw_warnings")
def test_the_log_of_a_worker(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_worker("rollout", 3)
    root.handle(logged())
    warn()
    assert_visible(capsys.readouterr().err, 6)


def test_a_traceback_of_a_reward_function(capsys: pytest.CaptureFixture[str]) -> None:
    _print(ValueError(HOSTILE))
    assert_visible(capsys.readouterr().err)


def test_the_names_of_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({f"eval/{HOSTILE}": 1.0})
    assert_visible(capsys.readouterr().out)


def test_the_progress_of_a_run() -> None:
    terminal = io.StringIO()
    progress = RunProgress()
    progress._console = Console(file=terminal)
    progress._print(HOSTILE)
    assert_visible(terminal.getvalue())


def test_standard_error_of_an_agents_program(
    tmp_path: Path, doctor_does: Callable[[Callable[[], Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"import sys; sys.stderr.buffer.write({HOSTILE.encode()!r}); sys.exit(3)"

    async def run_agent() -> None:
        async with serve_script(chat_tokenizer(tmp_path), []) as served:
            await run_command([sys.executable, "-c", code], served.gateway, served.session, {})

    def work() -> None:
        with driver_log(tmp_path, backend="cpu"):
            asyncio.run(run_agent())

    doctor_does(work)
    assert main(["doctor"]) == 1
    assert_visible(capsys.readouterr().err)
    assert_visible((tmp_path / "logs" / "driver.log").read_bytes().decode())
