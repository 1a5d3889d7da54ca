"""Rollout scheduler before a weight update: what it waits for, and what it pauses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from anygauge.rollout.producer import Producer
from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.generation_client import GenerationClient
from anygauge.trainer.rollout_scheduler import RolloutScheduler
from anygauge_hooks.rollout import Generator
from anygauge_tests.engine_config import engine_config


class Recorder:
    """A producer that only notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def shut(self) -> None:
        self.asked.append("shut")

    async def pause(self, drain_s: float) -> None:
        self.asked.append(f"pause after {drain_s} s")

    async def finish_open(self) -> None:
        self.asked.append("finish open groups")


@pytest.mark.parametrize(
    ("schedule", "keeps", "expected"),
    [
        ("sync", False, []),
        ("one_step_off", False, ["finish open groups"]),
        ("async", True, []),
        ("async", False, ["shut", "pause engines", "pause after 3.5 s"]),
    ],
)
def test_engines_that_keep_no_requests_are_paused_and_emptied(
    schedule: str, keeps: bool, expected: list[str]
) -> None:
    recorder = Recorder()

    def pause_engines() -> None:
        recorder.asked.append("pause engines")

    chosen: Callable[[], None] | None = None if keeps else pause_engines
    rollout = {"engine": "sglang", "schedule": schedule}
    config = engine_config("m", rollout=rollout, weight_sync={"drain_s": 3.5})
    with EventLoop() as loop:

        def wait(work: Coroutine[Any, Any, Any], what: str) -> Any:
            return loop.run(work)

        client = GenerationClient(cast("Generator", None), loop, wait, pause=chosen)
        scheduler = RolloutScheduler(cast("Producer", recorder), client, config, scorer=None, steps=1)
        scheduler.before_sync()
    assert recorder.asked == expected
