"""A group of workers whose processes are scripted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config.schema import Config
from anygauge.runtime import worker_group
from anygauge.runtime.rpc import Died, Returned, decode, encode
from anygauge.runtime.worker import HostInfo
from anygauge.runtime.worker_group import WorkerGroup
from anygauge_hooks.errors import DeadlineError, WorkerDiedError

ANSWER = encode(Returned(None))
EXITED = Died(how="exited with code 0")


class Script:
    """A transport on which the same arrives in every run."""

    death_grace_s = 0.0
    driver_node = "here"
    cluster = ""

    def __init__(self, *arrivals: Mapping[int, bytes | Died]) -> None:
        self._arrivals = iter(arrivals)
        self.orderly: bool | None = None

    def send(self, rank: int, message: bytes) -> None: ...

    def wait(self, timeout_s: float) -> Mapping[int, bytes | Died]:
        return next(self._arrivals, {})

    def end(self, *, orderly: bool) -> None:
        self.orderly = orderly


def group(script: Script) -> WorkerGroup:
    tree = {
        "run": {"name": "g"},
        "model": {"path": "m"},
        "data": {"train": ["d"]},
        "reward": {"function": "math"},
    }
    spec: Any = SimpleNamespace(
        num_workers=2, role="rollout", config=Config.model_validate(tree), log=str, collective=False
    )
    transport: Any = script
    return WorkerGroup(transport, spec)


def test_a_worker_may_exit_while_others_still_close() -> None:
    script = Script({0: ANSWER}, {0: EXITED}, {1: ANSWER})
    group(script).close()
    assert script.orderly


@pytest.mark.parametrize(
    ("method", "arrivals"),
    [("close", [{0: ANSWER}, {1: EXITED}]), ("train", [{0: ANSWER}, {0: EXITED}])],
    ids=["before it has closed", "after another answer"],
)
def test_every_other_end_is_an_error(method: str, arrivals: list[Mapping[int, bytes | Died]]) -> None:
    workers = group(Script(*arrivals))
    with pytest.raises(WorkerDiedError, match="exited with code 0"):
        workers.close() if method == "close" else workers.call(method)


class Records(Script):
    """A script that keeps which methods were called."""

    def __init__(self, *arrivals: Mapping[int, bytes | Died]) -> None:
        super().__init__(*arrivals)
        self.methods: list[str] = []
        self.limits: list[float] = []

    def send(self, rank: int, message: bytes) -> None:
        self.methods.append(decode(message).method)

    def wait(self, timeout_s: float) -> Mapping[int, bytes | Died]:
        self.limits.append(timeout_s)
        return super().wait(timeout_s)

    def located(self, hosts: Sequence[HostInfo]) -> None: ...


def test_workers_prepare_while_nobody_waits_for_them() -> None:
    located = encode(Returned(HostInfo(pid=1, host="h", ip="127.0.0.1", node="here")))
    both = {0: ANSWER, 1: ANSWER}
    script = Records({0: located, 1: located}, both, both)
    workers = group(script)
    workers.begin()
    assert script.methods == ["locate"] * 2 + ["start"] * 2, "the answers to start were not waited for"
    workers.ready()
    assert script.methods[4:] == ["connect"] * 2
    workers.ready()
    assert len(script.methods) == 6, "they are ready"


def test_workers_make_their_objects_while_nobody_waits_for_them() -> None:
    located = encode(Returned(HostInfo(pid=1, host="h", ip="127.0.0.1", node="here")))
    both = {0: ANSWER, 1: ANSWER}
    script = Records({0: located, 1: located}, both, both)
    workers = group(script)
    workers.connect()
    assert script.methods == ["locate"] * 2 + ["start"] * 2 + ["connect"] * 2
    assert len(script.limits) == 2, "the answers to connect were not waited for"
    for _ in range(2):
        workers.connect()
        workers.ready()
    assert (len(script.methods), len(script.limits)) == (6, 3)


def test_workers_that_are_waited_for_late_have_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    located = encode(Returned(HostInfo(pid=1, host="h", ip="127.0.0.1", node="here")))
    both, now = {0: ANSWER, 1: ANSWER}, [0.0]
    script = Records({0: located, 1: located}, both, both)
    monkeypatch.setattr(worker_group.time, "monotonic", lambda: now[0])
    workers = group(script)
    workers.begin()
    now[0] = 1e6
    workers.ready()
    assert min(script.limits[1:]) > 0


def test_workers_that_die_while_they_prepare_are_an_error_where_they_are_waited_for() -> None:
    located = encode(Returned(HostInfo(pid=1, host="h", ip="127.0.0.1", node="here")))
    script = Records({0: located, 1: located}, {1: EXITED})
    workers = group(script)
    workers.begin()
    with pytest.raises(WorkerDiedError, match="exited with code 0"):
        workers.ready()
    assert workers.is_ended


def test_a_watch_hears_of_each_answer_and_of_waiting() -> None:
    """An interval without an answer is not the deadline of the call."""
    heard: list[tuple[str, int, int]] = []
    script = Records({0: ANSWER}, {}, {1: ANSWER}, {0: ANSWER, 1: ANSWER})
    workers = group(script)
    with workers.watched(lambda *each: heard.append(each)):
        workers.call("serve", timeout_s=100)
    workers.call("train", timeout_s=100)
    assert heard == [("serve", 1, 2), ("serve", 1, 2), ("serve", 2, 2)]
    assert max(script.limits[:3]) <= worker_group.WATCH_S < 50 < script.limits[3]


def test_a_watched_call_has_its_deadline() -> None:
    workers = group(Records())
    workers._transport.stacks = lambda ranks: {}  # type: ignore[method-assign]
    with pytest.raises(DeadlineError), workers.watched(lambda *_: None):
        workers.call("serve", timeout_s=0)
