"""Many engines as one, while they die, hang, pause and come back."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from anygauge.config.schema import RolloutClient
from anygauge.rollout.gate import Gate
from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.load_balancer import Load
from anygauge.serving.sglang.client import channel, engine
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.fake_engine import EOS, FakeServer, Options, expected
from anygauge_tests.pauses import pause, pause_all, resume, resume_all
from anygauge_tests.processes import until

T = TypeVar("T")
SEED = 7
FOREVER = 100_000
IDLE = [Load(0, 0)]
OPTIONS = Options(token_s=0.0005, slots=8, lengths="uniform:20:60")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeServer]]:
    """Return two engines that every test leaves as it found them."""
    found = [FakeServer(OPTIONS), FakeServer(OPTIONS)]
    try:
        for server in found:
            server.start()
        yield found
    finally:
        for server in found:
            server.close()


@pytest.fixture(scope="module")
def mortal() -> Iterator[FakeServer]:
    """Return an engine that tests may harm; whoever needs it starts it."""
    found = FakeServer(OPTIONS)
    yield found
    found.close()


@asynccontextmanager
async def fleet_of(*servers: FakeServer, **options: Any) -> AsyncIterator[EnginePool]:
    died = options.pop("died", None)
    known = {"pause_s": 0.01, "concurrency": 8, "probe_every_s": 0.1, "probe_timeout_s": 5.0, **options}
    pool = EnginePool(RolloutClient(**known), died=died)
    for number, server in enumerate(servers):
        pool.add(f"engine-{number}", SGLangPeer(address=server.address))
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.parametrize(("written", "own", "limit"), [(None, 3, 3), (2, 3, 2), (5, 3, 5), (None, None, 256)])
def test_the_concurrency_of_an_engine_is_its_own_unless_it_is_set(
    written: int | None, own: int | None, limit: int
) -> None:
    async def limits() -> tuple[int | None, int]:
        pool = EnginePool(RolloutClient(concurrency=written))
        peer = SGLangPeer(address="http://127.0.0.1:1", data_parallel=2, max_running_requests=own)
        pool.add("engine-0", peer, state="paused")
        options = pool.client("engine-0").options
        assert isinstance(options, RolloutClient)
        (rank, _) = pool._balancer._engines["engine-0"]
        await pool.close()
        return options.concurrency, rank.concurrency

    assert run(limits()) == (2 * limit, limit)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 90))


def request(number: int, count: int = 1000, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        str(number), (5, number), SamplingParams(max_new_tokens=count, **params), seed=SEED
    )


def endless(number: int) -> GenerateRequest:
    return request(number, FOREVER, ignore_eos=True)


def check(number: int, found: Generation) -> None:
    """Compare a response with what its engine makes of its prompt."""
    tokens, log_probs = expected((5, number), SEED, "default", 0, len(found.tokens))
    assert found.tokens == (*tokens[:-1], EOS)
    assert found.log_probs == log_probs
    assert found.finish_reason == "stop"


def loaded(pool: EnginePool, name: str) -> int:
    return sum(load.requests for load in pool.report()[name].loads)


@contextmanager
def slowed(*servers: FakeServer) -> Iterator[None]:
    """Let engines make next to no tokens in the block, so that they have something when it is looked at."""
    for server in servers:
        server.fault("slow", argument=10_000.0)
    yield
    for server in servers:
        if server.is_alive():
            server.fault("slow", argument=1.0)


# -------------------------------------------------------------------------
# Nothing goes wrong
# -------------------------------------------------------------------------


def test_many_requests_over_two_engines(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(*servers) as pool:
            found = await asyncio.gather(*(pool.generate(request(number)) for number in range(60)))
            for number, generation in enumerate(found):
                check(number, generation)
            assert all(report.loads == IDLE for report in pool.report().values())

    before = [server.state()["finished"] for server in servers]
    run(work())
    counts = [server.state()["finished"] - was for server, was in zip(servers, before, strict=True)]
    assert sum(counts) == 60
    assert min(counts) > 10


def test_requests_wait_for_room_in_their_order(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(servers[0], concurrency=2) as pool:
            ended: list[int] = []

            async def one(number: int) -> None:
                await pool.generate(request(number, count=4, ignore_eos=True))
                ended.append(number)

            tasks = [asyncio.create_task(one(number)) for number in range(12)]
            await asyncio.sleep(0)
            assert loaded(pool, "engine-0") == 2
            assert pool.waiting == 10
            await asyncio.gather(*tasks)
            assert all(abs(place - number) < 3 for place, number in enumerate(ended))

    run(work())


def test_ranks_of_an_engine_get_their_requests() -> None:
    async def work() -> None:
        async with fleet_of() as pool:
            pool.add("wide", SGLangPeer(address=wide.address, data_parallel=2), concurrency=8)
            await pause(pool.client("wide"), "in_place")
            tasks = [asyncio.create_task(pool.generate(request(number))) for number in range(8)]
            await asyncio.sleep(0)
            assert [load.requests for load in pool.report()["wide"].loads] == [4, 4]
            await resume(pool.client("wide"))
            await asyncio.gather(*tasks)

    with FakeServer(Options(token_s=0.0005, dp_size=2)) as wide:
        run(work())


def test_a_refusal_reaches_who_asked(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(*servers) as pool:
            with pytest.raises(RolloutError, match="maximum context length"):
                await pool.generate(request(0, count=1 << 20))
            assert all(report.state == "serving" for report in pool.report().values())
            assert all(report.loads == IDLE for report in pool.report().values())

    run(work())


def test_cancelling_gives_the_place_back(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(servers[0], concurrency=1) as pool:
            first = asyncio.create_task(pool.generate(endless(0)))
            second = asyncio.create_task(pool.generate(endless(1)))
            third = asyncio.create_task(pool.generate(request(2)))
            await until(lambda: servers[0].state()["running"] == [1])
            second.cancel()
            first.cancel()
            check(2, await third)
            await asyncio.wait({first, second})
            assert pool.report()["engine-0"].loads == IDLE

    run(work())


# -------------------------------------------------------------------------
# Engines are lost
# -------------------------------------------------------------------------


def test_what_a_killed_engine_had_is_generated_elsewhere(
    servers: list[FakeServer], mortal: FakeServer
) -> None:
    async def work() -> None:
        died: list[str] = []
        async with fleet_of(mortal, servers[0], died=lambda name, reason: died.append(name)) as pool:
            with slowed(mortal):
                tasks = [asyncio.create_task(pool.generate(request(number))) for number in range(40)]
                await until(lambda: sum(mortal.state()["running"]) == 8)
                mortal.kill()
            for number, found in enumerate(await asyncio.gather(*tasks)):
                check(number, found)
            await until(lambda: died == ["engine-0"])
            report = pool.report()["engine-0"]
            assert report.state == "dead"
            assert "no sign of life: " in report.reason
            assert "GET /health" in report.reason
            # It comes back under its name, at another address.
            pool.add("engine-0", SGLangPeer(address=await asyncio.to_thread(mortal.start)))
            pool.mark("engine-1", "paused")
            check(41, await pool.generate(request(41)))

    mortal.start()
    run(work())


def test_what_a_hung_engine_had_is_generated_elsewhere(servers: list[FakeServer], mortal: FakeServer) -> None:
    async def work() -> None:
        async with fleet_of(mortal, servers[0], probe_timeout_s=0.5) as pool:
            with slowed(mortal):
                tasks = [asyncio.create_task(pool.generate(request(number))) for number in range(20)]
                await until(lambda: sum(mortal.state()["running"]) == 8)
                await asyncio.to_thread(mortal.fault, "hang")
            for number, found in enumerate(await asyncio.gather(*tasks)):
                check(number, found)

    mortal.start()
    run(work())


def test_what_an_unusable_engine_had_is_generated_elsewhere(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(*servers) as pool:
            await pause(pool.client("engine-0"), "in_place")
            tasks = [asyncio.create_task(pool.generate(request(number))) for number in range(8)]
            await until(lambda: len(servers[0].state()["requests"]) == 4)
            pool.mark("engine-0", "unusable", "half of an update")
            for number, found in enumerate(await asyncio.gather(*tasks)):
                check(number, found)
            await resume(pool.client("engine-0"))
            # Nobody counts what the engine made of them meanwhile, and it was told to stop.
            await until(lambda: not servers[0].state()["requests"])
            pool.mark("engine-0", "serving")
            pool.remove("engine-1")
            check(9, await pool.generate(request(9)))

    run(work())


def test_a_failing_request_does_not_go_round_for_ever(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(servers[0], attempts=3) as pool:
            for count in range(1, 4):
                await asyncio.to_thread(servers[0].fault, "error", "generate", count, 500)
            with pytest.raises(RolloutError, match="Request 0 failed in 3 attempts"):
                await pool.generate(request(0))
            # The engine is well: it serves whoever comes once the orders are used up.
            check(1, await pool.generate(request(1)))

    run(work())


def test_a_failing_engine_is_given_time_between_the_attempts(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []

    def pause_s(options: RolloutClient, failures: int) -> float:
        pauses.append(failures)
        return 0.001

    async def work() -> None:
        async with fleet_of(servers[0]) as pool:
            for count in range(1, 4):
                await asyncio.to_thread(servers[0].fault, "error", "generate", count, 503)
            check(0, await pool.generate(request(0)))

    monkeypatch.setattr("anygauge.serving.engine_pool.retry_pause_s", pause_s)
    run(work())
    assert pauses == [1, 2, 3]


def test_an_abort_ends_the_pause_between_two_attempts(
    servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with fleet_of(servers[0]) as pool:
            await asyncio.to_thread(servers[0].fault, "error", "generate", 1, 500)
            task = asyncio.create_task(pool.generate(request(0)))
            while not any(active.failures for active in pool._active):
                await asyncio.sleep(0.001)
            await pool.abort()
            assert (await task).finish_reason == "abort"

    monkeypatch.setattr("anygauge.serving.engine_pool.retry_pause_s", lambda options, failures: 60.0)
    run(work())


def test_all_attempts_share_one_deadline(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(*servers, request_timeout_s=0.3) as pool:
            with slowed(*servers), pytest.raises(RolloutError, match="Request 0 failed in 1 attempts"):
                await pool.generate(endless(0))

    run(work())


def test_an_engine_can_be_given_up_more_than_once(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(*servers) as pool:
            with slowed(servers[0]):
                tasks = [asyncio.create_task(pool.generate(request(number))) for number in range(4)]
                await until(lambda: bool(servers[0].state()["requests"]))
                for state in ("unusable", "dead", "unusable"):
                    pool.mark("engine-0", state)  # type: ignore[arg-type]
                    await asyncio.sleep(0)
            for number, found in enumerate(await asyncio.gather(*tasks)):
                check(number, found)

    run(work())


def test_an_outage_has_a_deadline(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(*servers, outage_timeout_s=0.2) as pool:
            pool.mark("engine-0", "paused", "an update")
            pool.mark("engine-1", "dead")
            with pytest.raises(DeadlineError) as error:
                await pool.generate(request(3))
            text = str(error.value)
            assert "No engine has served for 0.2 s; request 3 waited for one." in text
            assert "engine-0 is paused: an update." in text
            assert "engine-1 is dead: it was marked dead." in text
            pool.mark("engine-0", "serving")
            check(4, await pool.generate(request(4)))

    run(work())


def test_an_outage_that_ends_in_time_only_costs_time(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(outage_timeout_s=60.0) as pool:
            task = asyncio.create_task(pool.generate(request(1)))
            await asyncio.sleep(0)
            assert pool.waiting == 1
            pool.add("late", SGLangPeer(address=servers[0].address))
            check(1, await task)

    run(work())


def test_closing_ends_who_waits() -> None:
    async def work() -> None:
        async with fleet_of() as pool:
            task = asyncio.create_task(pool.generate(request(1)))
            await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="closed"):
            await task

    run(work())


# -------------------------------------------------------------------------
# All engines at once
# -------------------------------------------------------------------------


def test_an_abort_ends_what_runs_and_what_waits(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(*servers, concurrency=2) as pool:
            tasks = [asyncio.create_task(pool.generate(endless(number))) for number in range(7)]
            await until(lambda: all(sum(server.state()["running"]) == 2 for server in servers))
            await pool.abort()
            found = await asyncio.gather(*tasks)
            assert {generation.finish_reason for generation in found} == {"abort"}
            for number, generation in enumerate(found):
                assert (
                    generation.tokens == expected((5, number), SEED, "default", 0, len(generation.tokens))[0]
                )
            check(8, await pool.generate(request(8)))

    run(work())


def test_requests_of_others_wait_while_a_gate_closes(servers: list[FakeServer]) -> None:
    """An evaluation beside training sends again what the abort of all ended."""

    async def work() -> None:
        async with fleet_of(servers[0]) as pool:
            gate, other = Gate(pool), Gate(pool)
            gate.open()
            other.open()
            first = asyncio.create_task(gate.generate(endless(1)))
            await asyncio.create_task(until(lambda: sum(servers[0].state()["running"]) == 1))

            async def evaluate() -> Generation:
                while (generation := await other.generate(request(2))).finish_reason == "abort":
                    pass
                return generation

            pool.mark("engine-0", "paused")
            evaluation = asyncio.create_task(evaluate())
            await gate.close()
            assert (await first).finish_reason == "abort"
            assert servers[0].state()["running"] == [0]
            assert pool.waiting == 1
            pool.mark("engine-0", "serving")
            check(2, await evaluation)

    run(work())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_holds_everything_and_loses_nothing(servers: list[FakeServer], mode: Any) -> None:
    async def work() -> None:
        async with fleet_of(*servers) as pool:
            with slowed(*servers):
                tasks = [asyncio.create_task(pool.generate(request(number))) for number in range(20)]
                await until(lambda: all(sum(server.state()["running"]) == 8 for server in servers))
                await pause_all(pool, mode)
            assert {report.state for report in pool.report().values()} == {"paused"}
            late = asyncio.create_task(pool.generate(request(20)))
            await asyncio.sleep(0)
            assert pool.waiting > 0
            await resume_all(pool)
            for number, found in enumerate(await asyncio.gather(*tasks, late)):
                check(number, found)

    run(work())


def test_a_pause_that_aborts_returns_what_there_is(servers: list[FakeServer]) -> None:
    async def work() -> None:
        async with fleet_of(*servers) as pool:
            tasks = [asyncio.create_task(pool.generate(endless(number))) for number in range(4)]
            await until(lambda: all(sum(server.state()["running"]) > 0 for server in servers))
            await pause_all(pool, "abort")
            found = await asyncio.gather(*tasks)
            assert {generation.finish_reason for generation in found} == {"abort"}
            await resume_all(pool)
            check(5, await pool.generate(request(5)))

    run(work())


def test_an_engine_that_cannot_be_paused_is_dead(servers: list[FakeServer], mortal: FakeServer) -> None:
    async def work() -> None:
        async with fleet_of(servers[0], mortal, probe_timeout_s=0.5, control_timeout_s=30.0) as pool:
            await asyncio.to_thread(mortal.fault, "hang")
            await pause_all(pool, "retract")
            states = {name: report.state for name, report in pool.report().items()}
            assert states == {"engine-0": "paused", "engine-1": "dead"}
            await resume_all(pool)

    mortal.start()
    run(work())


@pytest.fixture
def file_limit() -> Iterator[int]:
    """Return the hard limit of open files; the soft one is put back after the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_file_left(hard: int) -> Iterator[None]:
    """Let this process have no file left to open."""
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 32, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def test_a_client_opens_as_many_connections_as_it_may(servers: list[FakeServer], file_limit: int) -> None:
    async def ask() -> tuple[int, int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(file_limit, 2**17) - 1, file_limit))
        async with fleet_of(servers[0]) as pool:
            check(1, await pool.generate(request(1)))
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    assert run(ask()) == (min(file_limit, 2**17), file_limit)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, 2**30, 2**17),
        (1024, resource.RLIM_INFINITY, 2**17),
        (2**20, 2**30, 2**20),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_of_open_files_stays_one_that_children_can_bear(
    soft: int, hard: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that closes every number below its limit takes minutes for the 2 ** 30 of some containers."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    channel.allow_open_files()
    assert limits[-1] == (raised, hard)


@pytest.mark.parametrize(("limit_s", "is_late"), [(60.0, False), (0.05, True)])
def test_an_engine_that_writes_a_profile_is_not_taken_for_dead(
    limit_s: float, is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang makes no token meanwhile, and its health check fails. Stacks would take it minutes."""
    monkeypatch.setattr(engine, "_PROFILE_S", limit_s)

    async def profile(address: str) -> tuple[list[str], str]:
        pool = EnginePool(RolloutClient(probe_every_s=0.01))
        pool.add("engine-0", SGLangPeer(address=address))
        wrong = await pool.start_profile({"engine-0": tmp_path})
        wrong += await pool.stop_profile(["engine-0"])
        state = pool.report()["engine-0"].state
        await pool.close()
        return wrong, state

    with FakeServer(replace(OPTIONS, profile_s=0.5)) as server:
        wrong, state = run(profile(server.address))
    assert (bool(wrong), state) == (is_late, "serving")
    if not is_late:
        (path,) = tmp_path.iterdir()
        assert json.loads(gzip.decompress(path.read_bytes()))["with_stack"] == 0


def test_an_engine_is_not_blamed_for_connections_that_this_process_cannot_open(
    servers: list[FakeServer], file_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "allow_open_files", lambda: None)

    async def ask() -> tuple[RolloutError, bool, str]:
        died: list[str] = []
        async with fleet_of(servers[0], died=lambda name, reason: died.append(reason)) as pool:
            with no_file_left(file_limit):
                with pytest.raises(RolloutError, match=r"limit of open files \(\d+\)") as error:
                    await pool.generate(request(1))
                answers = await pool.client("engine-0").is_healthy()
            assert died == []
            check(2, await pool.generate(request(2)))
            return error.value, answers, pool.report()["engine-0"].state

    error, answers, state = run(ask())
    assert "rollout.client.concurrency" in str(error)
    assert (answers, state) == (True, "serving"), "it was never asked"
