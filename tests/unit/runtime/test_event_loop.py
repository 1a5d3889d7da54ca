"""The driver's asyncio loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from anygauge.runtime.event_loop import EventLoop
from anygauge_hooks.errors import DeadlineError


def test_a_coroutine_or_function_runs_in_a_thread_of_its_own_and_returns() -> None:
    async def name() -> str:
        return threading.current_thread().name

    with EventLoop() as loop:
        assert loop.run(name()) == "rollout"
        assert loop.start(name()).result(10) == "rollout"
        assert loop.call(lambda: threading.current_thread().name) == "rollout"


def test_a_missed_deadline_cancels_what_it_waited_for_and_names_it() -> None:
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with EventLoop() as loop:
        with pytest.raises(DeadlineError, match=r"the answer: it was not there within 0\.01 s"):
            loop.run(forever(), timeout_s=0.01, what="the answer")
        assert cancelled.wait(10)


def test_a_coroutines_own_error_and_own_timeout_are_raised_as_they_are() -> None:
    async def fail(error: Exception) -> None:
        raise error

    with EventLoop() as loop:
        with pytest.raises(ValueError, match="wrong"):
            loop.run(fail(ValueError("wrong")), timeout_s=10)
        with pytest.raises(TimeoutError, match="mine"):
            loop.run(fail(TimeoutError("mine")), timeout_s=10)


def test_leaving_the_block_ends_what_still_runs() -> None:
    ended = []

    async def forever(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    async def turn() -> None:
        await asyncio.sleep(0)

    with EventLoop() as loop:
        futures = [loop.start(forever(number)) for number in range(3)]
        loop.run(turn())
    assert sorted(ended) == [0, 1, 2]
    assert all(future.cancelled() for future in futures)


def test_the_loop_is_idle_when_neither_a_callback_nor_a_thread_of_it_can_go_on() -> None:
    seen: list[str] = []
    leave = threading.Event()

    async def busy() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        seen.append("callbacks")
        await asyncio.to_thread(leave.wait, 20)
        seen.append("thread")

    async def watch(loop: EventLoop) -> None:
        idle = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(busy())
        loop.when_idle(lambda: (seen.append("idle"), idle.set_result(None)), frozenset)
        await asyncio.sleep(0.01)  # a timer is nothing that can go on by itself
        leave.set()
        await asyncio.gather(idle, task)

    with EventLoop() as loop:
        loop.run(watch(loop), timeout_s=20)
    assert seen == ["callbacks", "thread", "idle"]
