"""A group of workers whose processes are scripted."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config.schema import Config
from anygauge.runtime.rpc import Died, Returned, encode
from anygauge.runtime.worker_group import WorkerGroup
from anygauge_hooks.errors import WorkerDiedError

ANSWER = encode(Returned(None))
EXITED = Died(how="exited with code 0")


class Script:
    """A transport on which the same arrives in every run."""

    death_grace_s = 0.0
    driver_node = "here"

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
    spec: Any = SimpleNamespace(num_workers=2, role="rollout", config=Config.model_validate(tree), log=str)
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
