"""Engines that read prompts and engines that write: a request has one of both, and survives either."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from anygauge.config.schema import RolloutClient
from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.load_balancer import Load
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.fake_engine import EOS, FakeServer, Options, expected
from anygauge_tests.processes import until

SEED = 7
IDLE = [Load(0, 0)]
KINDS = ("prefill", "prefill", "decode", "decode")


def options(kind: str) -> Options:
    return Options(
        token_s=0.0005, slots=8, lengths="uniform:20:60", disaggregation=kind, bootstrap_s=2.0, start_s=0.002
    )


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeServer]]:
    """Return two engines of each kind; whoever kills one starts it again."""
    found = [FakeServer(options(kind)) for kind in KINDS]
    try:
        for server in found:
            server.start()
        yield found
    finally:
        for server in found:
            server.close()


@asynccontextmanager
async def fleet_of(*servers: FakeServer, **limits: Any) -> AsyncIterator[EnginePool]:
    known = {"pause_s": 0.01, "concurrency": 8, "probe_every_s": 0.1, "probe_timeout_s": 5.0, **limits}
    pool = EnginePool(RolloutClient(**known))
    for number, server in enumerate(servers):
        add(pool, f"engine-{number}", server)
    try:
        yield pool
    finally:
        await pool.close()


def add(pool: EnginePool, name: str, server: FakeServer) -> None:
    kind: Any = server.options.disaggregation.replace("null", "regular")
    pool.add(name, server.peer(), kind=kind)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 90))


def request(number: int, count: int = 1000, **params: Any) -> GenerateRequest:
    wanted = SamplingParams(max_new_tokens=count, **params)
    return GenerateRequest(str(number), (5, number), wanted, seed=SEED)


def check(number: int, found: Generation) -> None:
    tokens, log_probs = expected((5, number), SEED, "default", 0, len(found.tokens))
    assert found.tokens == (*tokens[:-1], EOS)
    assert found.log_probs == log_probs


def rooms(servers: list[FakeServer]) -> list[list[int]]:
    return [server.state()["rooms"] for server in servers]


def test_each_request_meets_in_a_room_of_its_own_and_each_kind_is_shared_out(
    servers: list[FakeServer],
) -> None:
    async def work() -> None:
        async with fleet_of(*servers) as pool:
            answers = await asyncio.gather(*(pool.generate(request(number)) for number in range(40)))
            for number, found in enumerate(answers):
                check(number, found)
            assert [report.kind for report in pool.report().values()] == list(KINDS)
            assert all(report.loads == IDLE for report in pool.report().values())

    run(work())
    met = rooms(servers)
    assert len({room for each in met[:2] for room in each}) == 40
    assert sorted(met[0] + met[1]) == sorted(met[2] + met[3])
    assert min(map(len, met)) >= 8, "the first 16 requests fill both of a kind"


def test_regular_engines_may_serve_beside_divided_ones(servers: list[FakeServer]) -> None:
    async def work() -> None:
        with FakeServer(options("null")) as whole:
            async with fleet_of(servers[0], servers[2], whole) as pool:
                for number, found in enumerate(
                    await asyncio.gather(*(pool.generate(request(number)) for number in range(24)))
                ):
                    check(number, found)
                assert await asyncio.to_thread(lambda: 4 < whole.state()["finished"] < 20)
                pool.mark("engine-0", "dead")  # nobody reads for the one that writes
                check(50, await pool.generate(request(50)))

    run(work())


def test_halves_serve_together_alone() -> None:
    async def work() -> None:
        async with fleet_of() as pool:
            for kind in ("prefill", "decode"):
                assert not pool.serves
                pool.add(kind, SGLangPeer(address="http://127.0.0.1:9"), kind=kind)  # type: ignore[arg-type]
            assert pool.serves
            pool.mark("prefill", "paused")
            assert not pool.serves, "the one that writes is of no use"

    run(work())


@pytest.mark.parametrize("lost", [0, 2], ids=["reads", "writes"])
def test_what_was_half_done_when_an_engine_is_killed_is_generated_elsewhere(
    lost: int, servers: list[FakeServer]
) -> None:
    async def work() -> None:
        async with fleet_of(*servers) as pool:
            victim = servers[lost]
            for server in servers:
                server.fault("slow", argument=300.0)
            tasks = [asyncio.create_task(pool.generate(request(number))) for number in range(20)]
            await until(lambda: sum(victim.state()["running"]) > 2)
            victim.kill()
            for server in servers:
                if server is not victim:
                    server.fault("slow", argument=1.0)
            for number, found in enumerate(await asyncio.gather(*tasks)):
                check(number, found)
            await until(lambda: pool.report()[f"engine-{lost}"].state == "dead")
            await asyncio.to_thread(victim.start)
            add(pool, f"engine-{lost}", victim)
            pool.mark(f"engine-{lost + 1}", "paused")
            check(30, await pool.generate(request(30)))
            assert all(report.loads == IDLE for report in pool.report().values())

    run(work())


def test_cancelling_gives_both_places_back(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(servers[0], servers[2], concurrency=1) as pool:
            task = asyncio.create_task(pool.generate(request(0, 100_000, ignore_eos=True)))
            await until(lambda: servers[2].state()["running"] == [1])
            task.cancel()
            check(1, await pool.generate(request(1)))
            assert all(report.loads == IDLE for report in pool.report().values())

    run(work())


def test_an_abort_ends_both_halves_and_what_waits_for_either(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(servers[0], servers[2], concurrency=2) as pool:
            servers[0].fault("slow", argument=10_000.0)
            tasks = [asyncio.create_task(pool.generate(request(number))) for number in range(4)]
            await until(lambda: servers[0].state()["running"] == [2])
            servers[0].fault("slow", argument=1.0)
            await pool.abort()
            for found in await asyncio.gather(*tasks):
                assert found.finish_reason in ("abort", "stop")
            check(5, await pool.generate(request(5)))

    run(work())


def test_without_one_who_reads_nobody_serves(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(servers[0], servers[2], outage_timeout_s=0.2) as pool:
            pool.mark("engine-0", "paused", "an update")
            with pytest.raises(DeadlineError, match=r"engine-0 is paused: an update\."):
                await pool.generate(request(3))
            pool.mark("engine-0", "serving")
            check(4, await pool.generate(request(4)))

    run(work())


def test_a_refusal_of_either_half_reaches_who_asked(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(servers[0], servers[2]) as pool:
            with pytest.raises(RolloutError, match="maximum context length"):
                await pool.generate(request(3, 1_000_000))
            assert all(report.loads == IDLE for report in pool.report().values())

    run(work())


def test_an_encoder_gets_no_request_and_is_found_when_it_dies(servers: list[FakeServer]) -> None:
    async def work() -> None:
        with FakeServer() as encoder:
            async with fleet_of(servers[0], servers[2]) as pool:
                pool.add("encoder", SGLangPeer(address=encoder.address), kind="encoder")
                check(4, await pool.generate(request(4)))
                await pool.abort()
                assert encoder.state()["events"] == {}
                encoder.kill()
                await until(lambda: pool.report()["encoder"].state == "dead")
                check(5, await pool.generate(request(5)))

    run(work())


def test_the_fake_engines_fail_a_request_whose_halves_do_not_meet(servers: list[FakeServer]) -> None:
    def ask(**fields: Any) -> tuple[int, str]:
        body = json.dumps({"input_ids": [5, 1], "sampling_params": {}, **fields}).encode()
        asked = urllib.request.Request(f"{servers[2].address}/generate", body)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(asked, timeout=30)
        return caught.value.code, caught.value.read().decode()

    host, port = servers[0].peer().bootstrap.split(":")
    assert ask()[0] == 400
    status, text = ask(bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=1)
    assert status == 500
    assert "room 1" in text
