"""The local launcher's own properties: exit codes, children, stopped processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from anygauge.runtime.worker_group import WorkerGroup
from anygauge_hooks.errors import WorkerDiedError, WorkerFailedError
from anygauge_tests.processes import wait_until_ended

Launch = Callable[..., WorkerGroup]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "exited with code 7"),
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGSEGV", "was killed by SIGSEGV"),
    ],
)
def test_an_exit_is_described(launch: Launch, how: str, text: str) -> None:
    group = launch("local", 1)
    with pytest.raises(WorkerDiedError) as caught:
        group.call("die", rank=0, how=how)
    assert str(caught.value).startswith(f"{group.workers[0]} {text}.")
    assert ("Fatal Python error" in str(caught.value)) == (how == "SIGSEGV")


@pytest.mark.usefixtures("cold_workers")
def test_a_worker_leads_a_session_that_ends_with_it(launch: Launch) -> None:
    with launch("local", 1) as group:
        pid = group.workers[0].pid
        assert os.getsid(pid) == os.getpgid(pid) == pid
        [child] = group.call("start_child")
        process = psutil.Process(child)
        assert process.is_running()
    assert not wait_until_ended([process], 2)


def test_what_a_dead_worker_started_ends_too(launch: Launch) -> None:
    group = launch("local", 1)
    [child] = group.call("start_child")
    process = psutil.Process(child)
    os.kill(group.workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        group.call("echo", value=1)
    assert not wait_until_ended([process], 2)


def test_workers_import_from_where_the_driver_does(
    launch: Launch, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "worker_of_a_user.py").write_text(
        "class Mine:\n    def __init__(self, config, context): ...\n    def hello(self): return __name__\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    with launch("local", 1, worker_class="worker_of_a_user:Mine") as group:
        assert group.call("hello") == ["worker_of_a_user"]


def test_a_worker_that_cannot_be_made_ends_the_start(launch: Launch) -> None:
    with pytest.raises(WorkerFailedError, match="no such data") as caught:
        launch("local", worker_class="anygauge_tests.workers:BrokenWorker")
    assert str(caught.value).startswith("Rank 1 (actor, pid ")
