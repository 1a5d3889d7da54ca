"""Wrong inputs, and what is said of them: each must be noticed, and its message must lead to the mistake.

    python bench/wrong_inputs.py                    # all, some minutes on two cores
    python bench/wrong_inputs.py --only data api    # some kinds
    python bench/wrong_inputs.py --only model --show    # with what each printed

The inputs are those of newcomers, of engineers who bring a config from another project, and of authors of
plugins: the tables are in ``wrong_inputs_cases.py``. Each runs in a copy of a directory with a tiny model, in
a process forked from one that has everything imported. A case names the exit status, the code of the error,
words that the message must have (the value, the place, what to do) and words that it must not have: a
traceback, a control character. The words were chosen by reading each message.

A case falls short where one of these is missed, or where the command takes longer than its limit. The script
ends with status 1 if any does. ``skipped`` are cases that this host cannot make, such as a full disk without
the right to mount one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from wrong_inputs_cases import CASES, Case
from wrong_inputs_place import make_place, open_server

from anygauge_tests.fork_server import ForkedProcess, ForkServers

TOGETHER = 2
SKIPPED = 77
"""Exit status of a preparation that is not possible here."""
NEVER = ("AssertionError", "NotImplementedError", "\x1b", "\x07")
"""In no message."""
TRACEBACK = "Traceback (most recent call last)"
SHOWN = 60
"""Characters of a command in the table."""


class Outcome(NamedTuple):
    """Result of a case."""

    case: Case
    status: int | None
    """``None`` if it did not end in time."""
    output: str
    seconds: float


def main() -> int:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="KIND", choices=sorted({case.kind for case in CASES}))
    parser.add_argument("--show", action="store_true", help="print what each command printed")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only is None or case.kind in arguments.only]
    grades: Counter[str] = Counter()
    for outcome in outcomes(cases):
        grade = shortcomings(outcome)
        grades[grade and "falls short"] += 1
        print(row(outcome, grade), flush=True)
        if arguments.show or (grade and grade != "skipped"):
            print("    " + outcome.output.encode("unicode_escape").decode().replace("\\n", "\n    "))
    short = sum(count for grade, count in grades.items() if grade)
    print(f"{sum(grades.values())} wrong inputs: {grades['']} as they should be, {short} fall short")
    return 1 if short else 0


def outcomes(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Run cases, some together, and yield what became of them in their order."""
    forks = ForkServers("cpu")
    with tempfile.TemporaryDirectory(prefix="wrong-inputs-") as name, open_server() as port:
        root = Path(name) / "place"
        root.mkdir()
        make_place(root)
        directories = [root.with_name(f"case-{number:03}") for number in range(len(cases))]
        first = Case("first", "train run.toml --run.name first", (), status=0, code="")
        outcome = run_case(forks, port, root, first, root)
        if outcome.status:
            raise SystemExit(f"the earlier run failed:\n{outcome.output}")
        with ThreadPoolExecutor(TOGETHER) as pool:
            yield from pool.map(partial(run_case, forks, port, root), cases, directories)
    forks.close()


def run_case(forks: ForkServers, port: int, root: Path, case: Case, directory: Path) -> Outcome:
    """Run a case in a directory that is a copy of the place."""
    if directory != root:
        shutil.copytree(root, directory)
    before = subprocess.Popen(["bash", "-c", case.before], cwd=directory, start_new_session=True)
    started = time.monotonic()
    try:
        if before.wait() == SKIPPED:
            return Outcome(case, SKIPPED, "", 0.0)
        outcome = run_command(forks, case, case.command.replace("{port}", str(port)), directory)
        if case.then:
            outcome = run_command(forks, case, case.then, directory)
    finally:
        stop_group(before.pid)
        subprocess.run(["bash", "-c", case.after], cwd=directory, check=True)
        if directory != root:
            shutil.rmtree(directory, ignore_errors=True)
    return outcome._replace(seconds=time.monotonic() - started)


def run_command(forks: ForkServers, case: Case, command: str, directory: Path) -> Outcome:
    """Run a command of anygauge, or a script of Python."""
    program, arguments = "anygauge", shlex.split(command)
    if case.kind == "api":
        program, arguments = str(directory / "script.py"), []
        (directory / "script.py").write_text(command, encoding="utf-8")
    path = directory / "output.txt"
    env = {**os.environ, "COLUMNS": "200", "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    with path.open("wb") as stream:
        process = forks.start(
            program, arguments, output=stream.fileno(), directory=str(directory), env=env, has_own=True
        )
        status = ended(process, case, path)
    return Outcome(case, status, path.read_text(encoding="utf-8", errors="replace"), 0.0)


def ended(process: ForkedProcess, case: Case, output: Path) -> int | None:
    """Wait for a command, strike it where the case says so, and return its exit status."""
    deadline, text = time.monotonic() + case.limit_s, case.strike[0] if case.strike else ""
    while process.poll() is None:
        if time.monotonic() > deadline:
            stop_group(process.pid)
            process.wait()
            return None
        if text and text in output.read_text(encoding="utf-8", errors="replace"):
            process.send_signal(case.strike[1])
            text = ""
        time.sleep(0.02)
    return process.returncode


def stop_group(pid: int) -> None:
    """Kill the processes that a preparation or a command has left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def shortcomings(outcome: Outcome) -> str:
    """Return in what a case falls short; empty if in nothing."""
    case, output = outcome.case, " ".join(outcome.output.split())
    if outcome.status == SKIPPED:
        return "skipped"
    if outcome.status is None:
        return f"did not end in {case.limit_s:g} s"
    status = case.then_status if case.then else case.status
    never = (*NEVER, *case.never, *(() if case.kind == "api" or case.has_traceback else (TRACEBACK,)))
    problems = [f"status {outcome.status} instead of {status}"] if outcome.status != status else []
    problems += [f"no [{case.code}]"] if case.code and f"[{case.code}]" not in output else []
    problems += [f"does not say {word!r}" for word in case.says if word not in output]
    problems += [f"says {word!r}" for word in never if word in outcome.output]
    return "; ".join(problems)


def row(outcome: Outcome, grade: str) -> str:
    """Return the line of a case."""
    case = outcome.case
    text = case.before if case.before != "true" and case.kind in ("data", "model") else case.command
    shown = text.encode("unicode_escape").decode().removeprefix("train run.toml ")
    shown = shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 3]}..."
    status = "-" if outcome.status is None else outcome.status
    facts = f"{status:>3} {case.code or '-':>5} {outcome.seconds:5.1f} s"
    return f"{case.kind:9}{shown:{SHOWN}} {facts}  {grade or 'ok'}"


if __name__ == "__main__":
    sys.exit(main())
