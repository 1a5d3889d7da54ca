"""Status lines of a start."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.observability.start_status import StartStatus
from anygauge.trainer import run as module


def test_lines_come_now_and_then_with_the_number_that_is_ready() -> None:
    lines: list[str] = []
    clock = [100.0]
    status = StartStatus(lines.append, "rollout engines", lambda: clock[-1])
    calls = [
        *((102, "connect", 0), (104, "locate", 0), (104, "connect", 0), (118, "connect", 0)),
        *((119, "connect", 0), (121, "connect", 8), (121, "serve", 0), (142, "serve", 3)),
    ]
    for seconds, method, answered in calls:
        clock.append(float(seconds))
        status(method, answered, 8)
    assert lines == [
        "rollout engines: 0 of 8 ready, 4 s",
        "rollout engines: 0 of 8 ready, 19 s",
        "rollout engines: 3 of 8 serving, 42 s",
    ]


@pytest.mark.parametrize(("waves", "is_watched"), [([0, 0], True), ([0, 1], False)])
def test_engines_that_start_one_after_another_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, waves: list[int], is_watched: bool
) -> None:
    watches: list[StartStatus] = []
    workers: Any = SimpleNamespace(watched=lambda watch: nullcontext(watches.append(watch)))
    config: Any = None
    monkeypatch.setattr(module, "plan_servers", lambda _: [SimpleNamespace(wave=wave) for wave in waves])
    module.watched_start(config, workers, print)
    assert len(watches) == is_watched
    module.watched_start(config, None, print)  # the training workers generate
