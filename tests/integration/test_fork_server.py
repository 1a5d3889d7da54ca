"""A process that is forked with everything imported is like one that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anygauge_tests.fork_server import ForkedProcess, ForkServers

FACTS = """
import json, os, sys, threading, torch

facts = {
    "parent": os.getppid(),
    "session": os.getsid(0),
    "group": os.getpgid(0),
    "directory": os.getcwd(),
    "arguments": sys.argv[1:],
    "name": __name__,
    "env": dict(os.environ),
    "descriptors": sorted(each for each in range(2000) if os.path.exists(f"/proc/self/fd/{each}")),
    "threads": len(os.listdir("/proc/self/task")),
    "main": threading.current_thread() is threading.main_thread(),
    "megatron": "megatron.core" in sys.modules,
    "sum": float(torch.ones(1000, 1000).sum()),
}
print(json.dumps(facts))
if sys.argv[1:]:
    os.write(int(sys.argv[1]), b"here")
"""

RENUMBERED = """
import fcntl, os, sys
from anygauge_tests.fork_server import _renumber

def files(descriptors):
    return [os.readlink(f"/proc/self/fd/{each}") for each in descriptors]

given = [fcntl.fcntl(os.pipe()[0], fcntl.F_DUPFD, int(sys.argv[1])) for _ in range(8)]
print(files(given))
numbers = [each + 1 for each in reversed(given)]
_renumber(given, numbers)
print(files(numbers))
"""

Start = StartScript = Callable[..., tuple[ForkedProcess, Path]]


@pytest.fixture
def start(fork_servers: ForkServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that runs a module's text and returns its process and what it prints to."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    started: list[ForkedProcess] = []

    def start(text: str, *arguments: str, **options: Any) -> tuple[ForkedProcess, Path]:
        (tmp_path / "module_under_test.py").write_text(text)
        output = tmp_path / "output"
        with output.open("ab") as file:
            started.append(
                fork_servers.start("module_under_test", arguments, output=file.fileno(), **options)
            )
        return started[-1], output

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_it_looks_like_a_process_that_was_started(start: Start, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        with os.fdopen(writing, "wb"):
            process, output = start(FACTS, str(writing), pass_fds=[writing], env={"KEY": "value"})
        assert process.wait(60) == 0
        assert pipe.read() == b"here"
    found = json.loads(output.read_text())
    assert found == {
        "parent": os.getpid(),
        "session": process.pid,
        "group": process.pid,
        "directory": str(tmp_path),
        "arguments": [str(writing)],
        "name": "__main__",
        "env": {"KEY": "value"},
        "descriptors": [0, 1, 2, writing],
        "threads": found["threads"],
        "main": True,
        "megatron": True,
        "sum": 1e6,
    }


@pytest.mark.parametrize("lowest", [3, 1000])
def test_descriptors_get_their_numbers_also_where_these_are_taken(start: Start, lowest: int) -> None:
    """A process of the tests has many open files, so numbers are high, and in the way of each other."""
    process, output = start(RENUMBERED, str(lowest))
    assert process.wait(60) == 0
    given, kept = output.read_text().splitlines()
    assert given == kept


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("{}['key']", 1, "KeyError: 'key'\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'last')", 0, "last\n"),
        ("from threading import Timer; Timer(0.1, print, ['later']).start()", 0, "later\n"),
    ],
)
def test_it_ends_as_such_a_process_does(start: Start, text: str, code: int, says: str) -> None:
    process, output = start(text)
    assert process.wait(60) == code
    assert process.poll() == process.returncode == code
    assert output.read_text().endswith(says)
    assert bool(output.read_text()) == bool(says)


def test_it_is_waited_for_in_vain_and_killed(start: Start) -> None:
    process, _ = start("import time; time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # to nobody


def test_the_process_of_the_tests_adopts_no_other_orphans(start: Start) -> None:
    start("")
    orphan = subprocess.check_output(["sh", "-c", "sleep 0.2 >&2 & echo $!"], text=True)
    assert f"\nPPid:\t{os.getpid()}\n" not in Path(f"/proc/{int(orphan)}/status").read_text()


def test_libraries_read_the_environment_that_it_was_given(start: Start, tmp_path: Path) -> None:
    text = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    process, output = start(text, env={**os.environ, "HF_HOME": str(tmp_path / "elsewhere")})
    assert process.wait(60) == 0
    assert output.read_text().strip() == str(tmp_path / "elsewhere" / "hub")


def test_a_script_imports_what_lies_beside_it(start_script: StartScript, tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("found = 'it'")
    script = tmp_path / "script.py"
    script.write_text("from beside_the_script import found; print(found, __name__)")
    process, output = start_script(script)
    assert process.wait(60) == 0
    assert output.read_text() == "it __main__\n"


def test_several_threads_may_wait_for_one_process() -> None:
    for _ in range(50):
        process = ForkedProcess(os.posix_spawn("/bin/true", ["true"], {}))
        with ThreadPoolExecutor(8) as threads:
            codes = [threads.submit(process.wait, 60) for _ in range(8)]
        assert {code.result() for code in codes} == {0}


@pytest.mark.parametrize(("has_own", "starts"), [(False, "subprocess"), (True, "anygauge_tests.fork_server")])
def test_the_workers_of_a_process_with_a_warm_one_are_forked(
    start_script: StartScript, tmp_path: Path, has_own: bool, starts: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("from anygauge.distributed.child_process import Popen; print(Popen.__module__)")
    process, output = start_script(script, has_own=has_own)
    assert process.wait(60) == 0
    assert output.read_text() == f"{starts}\n"
