"""Failures in a worker as the driver reports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.runtime.rpc import (
    Died,
    Raised,
    WorkerId,
    capture,
    deadline_error,
    decode,
    encode,
    error_of,
)
from anygauge_hooks.errors import AnygaugeError, DataError, WorkerDiedError, WorkerFailedError

WHO = {rank: WorkerId(role="actor", rank=rank, pid=10 + rank, host="here") for rank in range(3)}
LOST = Raised(traceback="RuntimeError: Connection reset by peer", lost_peer=True)
OWN = Raised(traceback="ValueError: own")
DEATH = Died(how="was killed by SIGKILL", log="last words")


def caught(error: BaseException) -> Raised:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - as a worker does
        return capture(raised)


@pytest.mark.parametrize(
    ("failures", "start"),
    [
        ({0: LOST, 1: DEATH}, "Rank 1 (actor, pid 11, here) was killed by SIGKILL."),
        ({0: LOST, 1: OWN}, "Rank 1 (actor, pid 11, here) raised:\nValueError: own"),
        ({2: OWN, 1: OWN}, "Rank 2 (actor, pid 12, here) raised:\nValueError: own"),
        ({0: LOST}, "Rank 0 (actor, pid 10, here) raised:\nRuntimeError: Connection reset by peer"),
    ],
)
def test_the_root_cause_comes_first(failures: dict[int, Raised | Died], start: str) -> None:
    assert str(error_of(failures, WHO)).startswith(start)


def test_consequences_are_listed_afterwards() -> None:
    error = error_of({0: LOST, 1: DEATH}, WHO)
    assert isinstance(error, WorkerDiedError)
    assert "The end of its log:\nlast words" in str(error)
    assert "Afterwards:\n  Rank 0 (actor, pid 10, here) raised RuntimeError" in str(error)


def test_a_worker_that_shows_no_stack_may_be_stopped() -> None:
    logs = {rank: Path(f"actor-{rank}.log") for rank in WHO}
    error = deadline_error("train", 9.0, list(WHO.values()), {0: "  a stack", 1: ""}, "run.timeout_s", logs)
    first, others = str(error).split(" at:\n")[1:]
    assert first.startswith("  a stack\nRanks 1-2 (actor), the first of whose logs is actor-1.log, are")
    assert others.startswith("  (no stack taken: ")
    assert "stopped by a signal" in others


def test_many_workers_are_ranges() -> None:
    who = [WorkerId(role="actor", rank=rank) for rank in (*range(40), 41, *range(60, 64))]
    error = str(deadline_error("start", 9.0, who, {}, "run.timeout_s", {0: Path("actor-0.log")}))
    assert "on 45 worker(s)" in error
    assert "Ranks 0-39, 41, 60-63 (actor)" in error
    assert error.count("actor") == 2  # the role, and one log


def test_the_original_exception_is_the_cause() -> None:
    error = error_of({0: caught(DataError("bad row", hint="fix it"))}, WHO)
    assert isinstance(error, WorkerFailedError)
    assert isinstance(error.__cause__, DataError)
    assert error.__cause__.hint == "fix it"
    assert "[AG301]" in str(error)


def test_an_exception_that_cannot_travel_leaves_its_text() -> None:
    class Local(Exception):
        pass

    outcome = caught(Local("gone"))
    assert outcome.pickled is None
    assert outcome.traceback.endswith("Local: gone")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:2"), True),
        (ConnectionResetError(104, "reset"), True),
        (ValueError("no connection to the data"), False),
    ],
)
def test_a_lost_peer_is_recognized(error: Exception, lost: bool) -> None:
    assert caught(error).lost_peer == lost


def test_errors_of_workers_survive_pickling() -> None:
    error = error_of({0: OWN}, WHO)
    copy: AnygaugeError = decode(encode(error))
    assert str(copy) == str(error)
