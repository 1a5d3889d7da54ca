"""Engines that give their memory to the trainers and get it back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from anygauge.config.schema import RolloutClient
from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.sglang.client import EngineClient
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest
from anygauge_tests.fake_engine import FakeServer, Options

CLIENT = RolloutClient(pause_s=0.01, attempts=2, control_timeout_s=5.0)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """Return an engine that every test leaves awake."""
    with FakeServer(Options(token_s=0.0005, lengths="uniform:20:60", sglang="0.5.17")) as found:
        yield found


@asynccontextmanager
async def fleet_of(server: FakeServer, **options: Any) -> AsyncIterator[EnginePool]:
    pool = EnginePool(CLIENT.model_copy(update=options))
    pool.add("engine", SGLangPeer(address=server.address))
    try:
        yield pool
    finally:
        await pool.set_memory_state("everything")
        await pool.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def request(number: int, count: int = 1000, **params: Any) -> GenerateRequest:
    return GenerateRequest(str(number), (5, number), SamplingParams(max_new_tokens=count, **params), seed=7)


def state_of(pool: EnginePool) -> str:
    return pool.report()["engine"].state


def test_memory_goes_and_comes_back_in_order(server: FakeServer) -> None:
    async def work() -> None:
        async with fleet_of(server) as pool:
            await pool.generate(request(1))
            await pool.set_memory_state("weights")
            assert server.state()["asleep"] == ["cuda_graph", "kv_cache"]
            await pool.set_memory_state("everything")
            assert server.state()["asleep"] == []
            assert state_of(pool) == "serving"
            await pool.generate(request(2))  # the weights had stayed

    run(work())


def test_nobody_generates_with_an_engine_asleep(server: FakeServer) -> None:
    async def work() -> None:
        async with fleet_of(server) as pool:
            await pool.set_memory_state("nothing")
            assert state_of(pool) == "asleep"
            assert server.state()["asleep"] == ["cuda_graph", "kv_cache", "weights"]
            with pytest.raises(
                RolloutError, match=r"Request 3 came while the trainers have .*it has nothing"
            ):
                await pool.generate(request(3))
            stranger = EngineClient(server.address, CLIENT)
            with pytest.raises(RolloutError, match="The engine is asleep"):
                await stranger.generate(request(4))
            with pytest.raises(RolloutError, match="The weights are asleep"):
                await stranger.command("/update_weights_from_disk", {"model_path": "x"}, purpose="weights")
            await pool.set_memory_state("everything")
            with pytest.raises(RolloutError, match="weights were released, and none were sent"):
                await stranger.generate(request(5))
            await stranger.close()

    run(work())
    server.close()
    server.start()


def test_a_request_waits_while_the_caches_alone_are_gone(server: FakeServer) -> None:
    async def work() -> None:
        async with fleet_of(server) as pool:
            await pool.set_memory_state("weights")
            waiting = asyncio.create_task(pool.generate(request(6)))
            await asyncio.sleep(0)
            assert not waiting.done()
            await pool.set_memory_state("everything")
            assert (await waiting).finish_reason == "stop"

    run(work())


def test_requests_that_were_given_up_are_waited_for(server: FakeServer) -> None:
    """The server would end if it were told to release memory that they use."""

    async def work() -> None:
        async with fleet_of(server) as pool:
            endless = [
                asyncio.create_task(pool.generate(request(n, 100_000, ignore_eos=True))) for n in (7, 8)
            ]
            while sum(server.state()["running"]) < 2:
                await asyncio.sleep(0.01)
            for task in endless:
                task.cancel()
            await asyncio.gather(*endless, return_exceptions=True)
            await pool.set_memory_state("weights")
            assert server.state()["asleep"] == ["cuda_graph", "kv_cache"]

    run(work())


def test_an_engine_that_somebody_else_uses_is_lost(server: FakeServer) -> None:
    async def work() -> None:
        stranger = EngineClient(server.address, CLIENT)
        theirs = asyncio.create_task(stranger.generate(request(9, 100_000, ignore_eos=True)))
        while not sum(server.state()["running"]):
            await asyncio.sleep(0.01)
        async with fleet_of(server, control_timeout_s=0.3) as pool:
            await pool.set_memory_state("nothing")
            report = pool.report()["engine"]
            assert report.state == "dead"
            assert "still had requests 0.3 s after it was asked to make room" in report.reason
        theirs.cancel()
        await asyncio.gather(theirs, return_exceptions=True)
        await stranger.close()

    run(work())
    assert server.state()["asleep"] == []


def test_a_server_that_was_started_again_has_all_its_memory(server: FakeServer) -> None:
    async def work() -> None:
        async with fleet_of(server) as pool:
            await pool.set_memory_state("weights")
            server.close()
            server.start()
            pool.add("engine", SGLangPeer(address=server.address), state="paused")
            await pool.set_memory_state("weights")
            assert server.state()["asleep"] == ["cuda_graph", "kv_cache"]

    run(work())
