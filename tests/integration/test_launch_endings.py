"""However a driver ends, it leaves no process and no shared-memory file behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from anygauge_tests.processes import wait_until_ended

DRIVER = Path(__file__).with_name("launch_driver.py")
SHARED_MEMORY = Path("/dev/shm")
MARK = "ANYGAUGE_TEST_MARK"
ENDINGS = {
    "success": (None, 0),
    "error": (None, 1),
    "interrupt": (signal.SIGINT, -signal.SIGINT),
    "terminate": (signal.SIGTERM, 128 + signal.SIGTERM),
    "kill": (signal.SIGKILL, -signal.SIGKILL),
}


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark every process that the test starts, directly or not, through the environment."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    before = set(os.listdir(SHARED_MEMORY))
    yield value
    orphans = [name for name in set(os.listdir(SHARED_MEMORY)) - before if not _is_used(name)]
    assert not orphans


def endings(*chosen: str, soak: Sequence[str]) -> pytest.MarkDecorator:
    """Take the ways to end, some of them in a soak alone: to the driver's contexts most are one exception."""
    rest = (pytest.param(ending, marks=pytest.mark.soak) for ending in soak)
    return pytest.mark.parametrize("ending", [*chosen, *rest])


@endings("success", "terminate", "kill", soak=["error", "interrupt"])
def test_a_local_run_leaves_nothing(ending: str, mark: str, tmp_path: Path) -> None:
    code, pids, output = drive("local", ending, tmp_path)
    left = marked(mark)
    if ending == "kill":  # nobody is there to wait for the workers: they end by themselves
        left = wait_until_ended(left, 3)
    assert not left
    assert len(pids) == 2
    assert code == ENDINGS[ending][1], output


@endings("error", soak=["success"])
def test_a_run_on_a_shared_cluster_leaves_nothing(
    ending: str, mark: str, tmp_path: Path, ray_cluster: str
) -> None:
    code, pids, output = drive("ray", ending, tmp_path, ray_cluster)
    assert not marked(mark)
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert code == ENDINGS[ending][1], output


@endings("interrupt", soak=["success", "terminate"])
def test_a_run_with_its_own_cluster_listens_to_this_host_and_leaves_nothing(
    ending: str, mark: str, tmp_path: Path
) -> None:
    found: set[str] = set()
    code, pids, output = drive("ray", ending, tmp_path, look=lambda: found.update(listening(mark)))
    assert found <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert found or ending == "success"  # it may be over by then
    left = wait_until_ended(marked(mark), 10)  # Ray's daemons end in the background
    assert not left
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert code == ENDINGS[ending][1], output


def drive(
    launcher: str,
    ending: str,
    directory: Path,
    address: str = "",
    look: Callable[[], None] = lambda: None,
) -> tuple[int, list[int], str]:
    """Run the driver to its end and return its exit code, the ids of its workers and what it wrote.

    :param look: Called once the workers are there.
    """
    command = [sys.executable, str(DRIVER), launcher, ending, str(directory), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        assert driver.stdout is not None
        first = driver.stdout.readline()
        look()
        number = ENDINGS[ending][0]
        if number is not None:
            driver.send_signal(number)
        output = first + driver.communicate(timeout=60)[0]
    return driver.returncode, [int(word) for word in first.split() if word.isdecimal()], output


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry a mark, this one excepted."""
    return [
        process for process in psutil.process_iter() if process.pid != os.getpid() and _has(process, mark)
    ]


def listening(mark: str) -> set[str]:
    """Return the addresses that the processes that carry a mark listen on."""
    found = set()
    for process in marked(mark):
        try:
            found |= {each.laddr.ip for each in process.net_connections("inet") if each.status == "LISTEN"}
        except psutil.Error:
            continue
    return found


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_used(name: str) -> bool:
    """Return whether a living process uses a shared-memory file; it is somebody else's then."""
    path = str(SHARED_MEMORY / name)
    for process in psutil.process_iter():
        try:
            if any(each.path.startswith(path) for each in (*process.memory_maps(), *process.open_files())):
                return True
        except psutil.Error:
            continue
    return not os.path.exists(path)
