"""A group of workers behaves the same under every launcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from anygauge.runtime.worker_group import WorkerGroup
from anygauge_hooks.errors import DataError, DeadlineError, WorkerDiedError, WorkerFailedError

Launch = Callable[..., WorkerGroup]
LAUNCHERS = ["local", "ray"]
FAST_S = 20.0


@pytest.fixture(scope="module", params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def group(launcher: str, launch: Launch) -> Iterator[WorkerGroup]:
    with launch(launcher, threads_per_worker=3) as group:
        yield group


def test_results_come_by_rank(group: WorkerGroup) -> None:
    assert group.call("echo", value="v", suffix="s") == [(0, "v", "s"), (1, "v", "s")]


def test_arguments_may_differ_by_rank(group: WorkerGroup) -> None:
    results = group.call("echo", per_rank=[(("a",), {}), ((), {"value": "b"})], suffix="s")
    assert results == [(0, "a", "s"), (1, "b", "s")]


def test_ranks_share_a_process_group(group: WorkerGroup) -> None:
    assert group.call("sum_ranks") == [3.0, 3.0]


def test_an_asynchronous_call_is_answered_later(group: WorkerGroup) -> None:
    pending = group.call_async("sum_ranks")
    assert pending.result() == [3.0, 3.0]


def test_tensors_arrive_writable_and_as_copies(group: WorkerGroup) -> None:
    value = torch.arange(100_000.0)
    doubled = group.call("double", tensor=value)
    assert all(torch.equal(result.mul_(1), value * 2) for result in doubled)


def test_large_arrays_arrive_writable(group: WorkerGroup) -> None:
    array = np.arange(300_000.0)
    [(_, first, _), _] = group.call("echo", value=array)
    first += 1
    assert np.array_equal(first, array + 1)


def test_workers_are_prepared(group: WorkerGroup) -> None:
    first, second = group.call("describe")
    assert first["pid"] != second["pid"]
    assert [first["pid"], second["pid"]] == [worker.pid for worker in group.workers]
    assert first["threads"] == 3
    assert first["env"]["OMP_NUM_THREADS"] == "3"
    assert first["env"]["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"  # from the backend's worker_env
    assert first["dist_backend"] == "gloo_serial"
    assert first["device"] == "cpu"
    assert first["main_thread"]
    assert first["run"] == "launch"


def test_output_goes_to_the_log_of_the_run(
    group: WorkerGroup, worker_log: Callable[[WorkerGroup, int], Path]
) -> None:
    group.call("say", per_rank=[(("hello from 0",), {}), (("hello from 1",), {})])
    assert "hello from 1" in worker_log(group, 1).read_text()
    assert worker_log(group, 1).name == "actor-1.log"


def test_the_first_error_is_raised_with_its_own_traceback(launcher: str, launch: Launch) -> None:
    group = launch(launcher)
    started = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        group.call("fail", rank=1, kind="data")
    assert time.monotonic() - started < FAST_S
    assert str(caught.value).startswith(f"{group.workers[1]} raised:\nTraceback")
    assert 'raise DataError("bad row", hint="fix the row")' in str(caught.value)
    assert "[AG301]" in str(caught.value)
    assert isinstance(caught.value.__cause__, DataError)
    assert not any(psutil.pid_exists(worker.pid) for worker in group.workers)
    with pytest.raises(WorkerDiedError, match="were ended"):
        group.call("echo", value=1)


def test_a_worker_that_dies_is_named_before_the_errors_that_it_causes(launcher: str, launch: Launch) -> None:
    group = launch(launcher)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        group.call("die", rank=1, how="SIGKILL")
    assert time.monotonic() - started < FAST_S
    assert str(caught.value).startswith(str(group.workers[1]))
    assert "last words" in str(caught.value)
    assert "ran out of memory" in str(caught.value.hint)
    assert not any(psutil.pid_exists(worker.pid) for worker in group.workers)


def test_a_worker_that_dies_after_its_answer_ends_the_call(launcher: str, launch: Launch) -> None:
    group = launch(launcher)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        group.call("die_later", rank=1)
    assert time.monotonic() - started < FAST_S
    assert str(caught.value).startswith(str(group.workers[1]))


def test_a_deadline_names_the_method_and_shows_the_stacks(
    launcher: str, launch: Launch, worker_log: Callable[[WorkerGroup, int], Path]
) -> None:
    group = launch(launcher)
    pending = group.call_async("hang")
    for rank in range(2):
        wait_for_text(worker_log(group, rank), "hanging")
    with pytest.raises(DeadlineError) as caught:
        pending.result(timeout_s=0.1)
    message = str(caught.value)
    assert "'hang' did not finish within 0.1 s on 2 worker(s)." in message
    for rank, worker in enumerate(group.workers):
        assert f"{worker}, whose log is {worker_log(group, rank)}, is at:" in message
    assert message.count(" in hang\n") == 2
    assert not any(psutil.pid_exists(worker.pid) for worker in group.workers)


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in path.read_text():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
