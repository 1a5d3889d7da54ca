"""Rollout scheduler before a weight update, and after a step that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest

from anygauge.rollout.producer import Producer
from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.generation_client import GenerationClient
from anygauge.trainer import rollout_scheduler as module
from anygauge.trainer.rollout_scheduler import RolloutScheduler
from anygauge_hooks.errors import RewardError
from anygauge_hooks.rollout import Generator
from anygauge_tests.engine_config import engine_config


class Recorder:
    """A producer that only notes what it is asked for."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.asked: list[str] = []
        self.hangs = hangs

    async def shut(self) -> None:
        self.asked.append("shut")

    async def pause(self, drain_s: float) -> None:
        self.asked.append(f"pause after {drain_s} s")

    async def finish_open(self) -> None:
        self.asked.append("finish open groups")

    async def take(self, count: int, **_: Any) -> None:
        self.asked.append("take")
        raise RewardError("a reward failed")

    async def stop(self) -> None:
        self.asked.append("stop")
        if self.hangs:
            await asyncio.Event().wait()


@contextmanager
def scheduler_of(recorder: Recorder, *, pauses: bool = False, **rollout: Any) -> Iterator[RolloutScheduler]:
    """Yield a scheduler with this producer; its engines end their requests for an update if ``pauses``."""
    config = engine_config("m", rollout={"engine": "sglang", **rollout}, weight_sync={"drain_s": 3.5})
    pause = partial(recorder.asked.append, "pause engines") if pauses else None
    with EventLoop() as loop:

        def wait(work: Coroutine[Any, Any, Any], what: str) -> Any:
            return loop.run(work)

        client = GenerationClient(cast("Generator", None), loop, wait, pause=pause)
        yield RolloutScheduler(cast("Producer", recorder), client, config, scorer=None, steps=1)


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
    with scheduler_of(recorder, pauses=not keeps, schedule=schedule) as scheduler:
        scheduler.before_sync()
    assert recorder.asked == expected


@pytest.mark.parametrize("hangs", [False, True])
def test_a_step_that_fails_leaves_no_request(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that is written then may need the engines' devices; an engine that hangs is left."""
    monkeypatch.setattr(module, "STOP_S", 0.1 if hangs else 60.0)
    recorder = Recorder(hangs=hangs)
    with scheduler_of(recorder) as scheduler, pytest.raises(RewardError):
        scheduler.collect(1)
    assert recorder.asked == ["take", "stop"]
