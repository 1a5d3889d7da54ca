"""Exit status, and what a user sees of an error."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.cli import doctor, main
from anygauge.runtime.rpc import WorkerId, capture, error_of
from anygauge_hooks.errors import AnygaugeError, ConfigError, DataError

WAITING = """
import signal, sys
from anygauge.cli import doctor, main

def run(args):
    print("ready", flush=True)
    signal.pause()

doctor.run = run
sys.exit(main(["doctor"]))
"""
VERL_LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture
def doctor_does(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Return a function that makes the doctor command raise."""

    def doctor_does(error: BaseException) -> None:
        def run(args: argparse.Namespace) -> int:
            raise error

        monkeypatch.setattr(doctor, "run", run)

    return doctor_does


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "no command 'trian'; did you mean train?"),
        (["train"], "the following arguments are required: CONFIG.toml"),
        (["train", "a.toml", "--lr", "1"], "--lr 1 (did you mean --train.lr or --critic.lr?)"),
        (["train", "a.toml", "train.lr=1"], "train.lr=1 (write --train.lr 1)"),
        (["train", "a.toml", "-train.lr", "1"], "(a config key begins with two dashes: --train.lr)"),
        (["train", "a.toml", "--num-rollout", "9"], "(write --run.steps (docs/migrate/slime.md))"),
        (["train", "a.toml", f"{VERL_LR}=1e-6"], f"{VERL_LR}=1e-6 (write --train.lr (docs/migrate/verl.md))"),
        (["train", "a.toml", "+trainer.total_epochs=3"], "(set run.steps: epochs (30 by default"),
        (["train", "a.toml", "trainer.zzz=3"], "(a table of verl: `anygauge import verl FILE`"),
        (["train", "a.toml", "zzz.zzz=3"], "(a config key is --section.key value)"),
        (["train", "a.toml", "--lerning-rate", "1"], "(did you mean --train.lr?)"),
        (["train", "a.toml", "--device", "cuda"], "(--backend NAME is the kind of device, "),
        (["train", "a.toml", "--dryrun"], "(did you mean --dry-run?)"),
        (["train", "a.toml", "--zzz"], "(a config key is --section.key value)"),
        (["doctor", "--train.lr", "1"], "unrecognized arguments: --train.lr 1"),
        (["train", "a.toml", "--dry"], "unrecognized arguments: --dry"),
        (["train", "--keys", "--bogus"], "usage: anygauge train CONFIG.toml"),
        (["train", "--keys", "--bogus"], "unrecognized arguments: --bogus"),
        (["doctor", "--timeout", "nan"], "argument --timeout: 'nan' is not a finite number above 0"),
        (["doctor", "--timeout", "0"], "'0' is not a finite number above 0"),
        (["doctor", "--timeout=-3"], "'-3' is not a finite number above 0"),
        (["doctor", "--timeout", "inf"], "'inf' is not"),
        (["doctor", "--timeout", "soon"], "'soon' is not"),
        (["convert", "a", "b"], "one of the arguments --to-megatron --to-hf --to-bfloat16 is required"),
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["--version"]])
def test_help_exits_with_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    assert "anygauge" in capsys.readouterr().out


def test_an_error_has_its_code_and_no_traceback(
    doctor_does: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    doctor_does(ConfigError("It is wrong.", hint="Put it right."))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "anygauge: error: It is wrong.\n  Put it right.\n  [AG201]\n"


def test_the_traceback_can_be_asked_for(
    doctor_does: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYGAUGE_DEBUG", "1")
    doctor_does(ConfigError("It is wrong."))
    assert main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def failed_worker(error: Exception) -> AnygaugeError:
    who = {1: WorkerId(role="actor", rank=1, pid=7, host="node-1"), 0: WorkerId(role="actor", rank=0)}
    return error_of({1: capture(error), 0: capture(ConnectionError("reset"))}, who)


def test_what_a_worker_raises_on_purpose_reads_like_an_error_of_the_driver(
    doctor_does: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doctor_does(failed_worker(DataError("No such row.", hint="Add it.")))
    assert main(["doctor"]) == 1
    expected = "anygauge: error: Rank 1 (actor, pid 7, node-1): No such row.\n  Add it.\n  [AG301]\n"
    assert capsys.readouterr().err == expected
    monkeypatch.setenv("ANYGAUGE_DEBUG", "1")
    assert main(["doctor"]) == 1
    assert "Rank 1 (actor, pid 7, node-1) raised:\n" in capsys.readouterr().err


def test_any_other_exception_of_a_worker_comes_with_its_traceback(
    doctor_does: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    doctor_does(failed_worker(ZeroDivisionError("by zero")))
    assert main(["doctor"]) == 1
    errors = capsys.readouterr().err
    assert "Rank 1 (actor, pid 7, node-1) raised:\nZeroDivisionError: by zero" in errors
    assert "[AG702]" in errors


def test_an_error_of_ours_is_not_dressed_up(doctor_does: Callable[[BaseException], None]) -> None:
    doctor_does(ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (SystemExit(143), 143), (SystemExit(int(signal.SIGTERM)), 143)],
)
def test_a_stop_is_a_status(
    doctor_does: Callable[[BaseException], None], error: BaseException, status: int
) -> None:
    doctor_does(error)
    assert main(["doctor"]) == status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_in_order(number: signal.Signals, status: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == status
    assert "Traceback" not in errors


SHUTTING_DOWN = """
import atexit, signal, sys
from anygauge.cli import doctor, main

def interrupt(where):
    print(where, flush=True)
    sys.stdin.readline()

def run(args):
    try:
        interrupt("running")
    finally:
        interrupt("ending")

doctor.run = run
sys.argv[1:] = ["doctor"]
atexit.register(interrupt, "leaving")
status = main()
interrupt("over")
sys.exit(status)
"""


def test_any_number_of_interrupts_is_one_line_and_one_status() -> None:
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        [sys.executable, "-c", SHUTTING_DOWN], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    for where in ("running", "ending", "over", "leaving"):
        assert child.stdout.readline() == f"{where}\n"
        for _ in range(3):
            child.send_signal(signal.SIGINT)
        if where != "running":
            child.stdin.write("\n")
            child.stdin.flush()
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, "anygauge: interrupted\n")


def test_an_interrupt_while_the_commands_are_imported_is_one_line() -> None:
    code = (
        "import builtins, os, signal, sys\n"
        "original = builtins.__import__\n"
        "def importing(name, *rest):\n"
        "    if name == 'anygauge.cli.entry':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return original(name, *rest)\n"
        "builtins.__import__ = importing\n"
        "from anygauge.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "anygauge: interrupted\n")


def test_the_signal_handlers_are_put_back(doctor_does: Callable[[BaseException], None]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    doctor_does(KeyboardInterrupt())
    main(["doctor"])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_error_message(unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "anygauge", "keys"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


PRINTING = """
import subprocess, sys
from anygauge.cli import doctor, main

def run(args):
    print("x")
    return subprocess.run(["true"], check=True).returncode

doctor.run = run
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, PRINTING]
    ended = subprocess.run(command, check=False, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    command = [sys.executable, "-c", PRINTING]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command,
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith("anygauge: error: standard output cannot be written: [Errno 28]")
    assert len(ended.stderr.splitlines()) == 1
