"""The client of one engine, against a fake one in a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from anygauge.config.schema import RolloutClient
from anygauge.serving.sglang.client import EngineClient, Expected, check_engine
from anygauge.serving.sglang.client.batches import RefusedTogetherError
from anygauge.serving.sglang.client.channel import Channel
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.serving import EngineAwayError
from anygauge_tests.fake_engine import EOS, FakeServer, Options, expected
from anygauge_tests.pauses import pause, resume
from anygauge_tests.processes import until

T = TypeVar("T")
PROMPT = (5, 11, 2)
SEED = 7
FOREVER = 100_000
"""Tokens that no test waits for."""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """Return an engine that every test leaves as it found it."""
    with FakeServer(Options(token_s=0.0005, slots=8, lengths="uniform:20:60")) as found:
        yield found


@asynccontextmanager
async def connected(server: FakeServer, **options: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(server.address, RolloutClient(**{"pause_s": 0.01, **options}))
    try:
        yield client
    finally:
        await client.close()


def request(name: str = "7-0-0", count: int = 1000, **params: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, SamplingParams(max_new_tokens=count, **params), seed=SEED)


def endless(name: str = "endless") -> GenerateRequest:
    return request(name, FOREVER, ignore_eos=True)


def has_tokens(server: FakeServer, count: int = 1) -> bool:
    """Return whether so many requests have at least one token each."""
    return sum(tokens > 0 for tokens in server.state()["requests"].values()) == count


def idle(server: FakeServer) -> bool:
    return not any(server.state()["running"])


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


async def ask(server: FakeServer, *requests: GenerateRequest, **options: Any) -> list[Generation]:
    async with connected(server, **options) as client:
        return await asyncio.gather(*map(client.generate, requests))


# -------------------------------------------------------------------------
# Generation
# -------------------------------------------------------------------------


def test_tokens_and_log_probs_are_those_of_the_engine(server: FakeServer) -> None:
    (found,) = run(ask(server, request()))
    tokens, log_probs = expected(PROMPT, SEED, "default", 0, len(found.tokens))
    assert (*tokens[:-1], EOS) == found.tokens
    assert log_probs == found.log_probs
    assert found.weight_versions == (0,) * len(tokens)
    assert found.finish_reason == "stop"


def test_the_budget_ends_a_response(server: FakeServer) -> None:
    (found,) = run(ask(server, request(count=5)))
    assert (len(found.tokens), found.finish_reason) == (5, "length")


def test_what_ends_a_response_is_part_of_it(server: FakeServer) -> None:
    (whole,) = run(ask(server, request(count=20, ignore_eos=True)))
    by_token, by_text = run(
        ask(
            server,
            request("a", 20, ignore_eos=True, stop_token_ids=(whole.tokens[7],)),
            request("b", 20, ignore_eos=True, stop=(f"<{whole.tokens[9]}>",)),
        )
    )
    assert (by_token.tokens, by_token.finish_reason) == (whole.tokens[:8], "stop")
    assert by_text.tokens[:10] == whole.tokens[:10]
    assert by_text.finish_reason == "stop"


def test_a_partial_response_is_gone_on_from(server: FakeServer) -> None:
    (whole,) = run(ask(server, request()))
    begun = request()._replace(tokens=PROMPT + whole.tokens[:6])
    (rest,) = run(ask(server, begun))
    assert whole.tokens[:6] + rest.tokens == whole.tokens


def test_each_token_names_the_weights_that_made_it(server: FakeServer) -> None:
    async def update() -> Generation:
        async with connected(server) as client:
            asked = asyncio.create_task(client.generate(request("both", 1500, ignore_eos=True)))
            await until(lambda: has_tokens(server))
            await pause(client, "retract")
            body = {"new_version": "3", "abort_all_requests": False}
            await client.command("/update_weight_version", body, purpose="a version")
            await resume(client)
            found = await asked
            await client.command(
                "/update_weight_version", {"new_version": "default"}, purpose="the old version"
            )
            return found

    whole = run(update())
    versions = whole.weight_versions
    cut = versions.index(3)
    assert versions == (0,) * cut + (3,) * (1500 - cut)
    assert whole.tokens[:cut] == expected(PROMPT, SEED, "default", 0, cut)[0]
    assert whole.tokens[cut:] == expected(PROMPT, SEED, 3, cut, 1500)[0]


def test_an_older_engine_has_one_version_for_all_tokens() -> None:
    with FakeServer(Options(sglang="0.5.17", weight_version="12", token_s=0.0)) as older:
        (found,) = run(ask(older, request()))
    assert set(found.weight_versions) == {12}


# -------------------------------------------------------------------------
# The end of a request
# -------------------------------------------------------------------------


def test_an_abort_returns_what_there_is(server: FakeServer) -> None:
    async def abort() -> Generation:
        async with connected(server) as client:
            task = asyncio.create_task(client.generate(endless()))
            await until(lambda: has_tokens(server))
            await client.abort()
            return await task

    found = run(abort())
    assert found.finish_reason == "abort"
    assert found.tokens == expected(PROMPT, SEED, "default", 0, len(found.tokens))[0]


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_batch_that_an_abort_breaks_is_not_sent_again(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    """SGLang refuses a batch that an abort hits half read. Requests sent again would miss that abort."""

    async def ask_once() -> Generation:
        async with connected(server) as client:

            async def refuse(*_: Any, **__: Any) -> Generation:
                if is_aborted:
                    await client.abort()
                raise RefusedTogetherError("duplicate")

            monkeypatch.setattr(client._batches, "generate", refuse)
            return await client.generate(request("1", 100))

    generation = run(ask_once())
    assert (generation.finish_reason == "abort") == is_aborted
    assert bool(generation.tokens) != is_aborted


def test_cancelling_ends_the_request_in_the_engine_and_no_other(server: FakeServer) -> None:
    """An engine ends every request whose id begins with the one it is given: ids must be told apart."""

    async def cancel() -> Generation:
        async with connected(server) as client:
            first, second = (asyncio.create_task(client.generate(endless(name))) for name in ("1", "10"))
            await until(lambda: has_tokens(server, 2))
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            await until(lambda: server.state()["running"] == [1])
            assert not second.done()
            await client.abort()
            return await second

    assert run(cancel()).tokens


def test_a_deadline_names_engine_request_and_what_was_waited_for(server: FakeServer) -> None:
    with pytest.raises(DeadlineError) as found:
        run(ask(server, endless("12-3-4"), request_timeout_s=0.2))
    text = str(found.value)
    assert server.address in text
    assert "request 12-3-4" in text
    assert "POST /generate" in text
    run(until(lambda: idle(server)))


def test_no_more_requests_are_sent_than_there_is_room_for(server: FakeServer) -> None:
    async def crowd() -> int:
        async with connected(server, concurrency=2) as client:
            await pause(client, "in_place")
            tasks = [asyncio.create_task(client.generate(request(str(name)))) for name in range(6)]
            await until(lambda: server.state()["events"].get("generate", 0) >= before + 2)
            most = len(client._rids)
            await resume(client)
            await asyncio.gather(*tasks)
            return most

    before = server.state()["events"].get("generate", 0)
    assert run(crowd()) == 2
    assert server.state()["events"]["generate"] == before + 6


# -------------------------------------------------------------------------
# Failures
# -------------------------------------------------------------------------


def test_what_is_refused_together_is_asked_for_one_by_one_under_new_ids(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[Any] = []
    send = Channel.request

    async def keep(channel: Channel, path: str, body: bytes | None, **limits: Any) -> bytes:
        if path == "/generate":
            ids.append(json.loads(body or b"")["rid"])
        return await send(channel, path, body, **limits)

    monkeypatch.setattr(Channel, "request", keep)
    server.fault("error", count=1, argument=400)
    generations = run(ask(server, *(request(str(name), count=3) for name in range(3))))
    assert all(generation.tokens for generation in generations)
    together, *alone = ids
    assert len(together) == len(alone) == 3
    assert not {*together} & {*alone}


def test_a_refusal_is_final(server: FakeServer) -> None:
    before = server.state()["events"].get("generate", 0)
    with pytest.raises(RolloutError, match="maximum context length") as found:
        run(ask(server, request(count=1 << 20)))
    assert not isinstance(found.value, EngineAwayError)
    assert server.state()["events"]["generate"] == before + 1


def test_a_failure_is_told_after_one_attempt(server: FakeServer) -> None:
    server.fault("error", count=1, argument=503)
    before = server.state()["events"].get("generate", 0)
    with pytest.raises(EngineAwayError, match="503"):
        run(ask(server, request()))
    assert server.state()["events"]["generate"] == before + 1


def test_a_dead_engine_is_away() -> None:
    async def die() -> None:
        async with connected(mortal) as client:
            asked = asyncio.create_task(client.generate(endless()))
            await until(lambda: has_tokens(mortal))
            mortal.kill()
            with pytest.raises(EngineAwayError, match="cannot be reached"):
                await asked
            assert not await client.is_answering()

    with FakeServer() as mortal:
        run(die())


def test_a_hung_engine_has_no_sign_of_life() -> None:
    async def probe() -> tuple[bool, bool]:
        async with connected(mortal) as client:
            before = await client.is_healthy()
        mortal.fault("hang")
        async with connected(mortal, probe_timeout_s=0.2) as client:
            return before, await client.is_healthy()

    with FakeServer() as mortal:
        assert run(probe()) == (True, False)


def test_a_paused_engine_answers_and_makes_no_token(server: FakeServer) -> None:
    async def probe() -> tuple[bool, bool]:
        async with connected(server) as client, connected(server, probe_timeout_s=0.2) as hasty:
            await pause(client, "retract")
            found = await client.is_answering(), await hasty.is_healthy()
            await resume(client)
            return found

    assert run(probe()) == (True, False)


def test_the_cache_is_not_flushed_while_requests_run(server: FakeServer) -> None:
    async def flush() -> tuple[bool, bool]:
        async with connected(server) as client:
            task = asyncio.create_task(client.generate(endless()))
            await until(lambda: has_tokens(server))
            while_running = await client.flush_cache()
            await client.abort()
            await task
            return while_running, await client.flush_cache()

    assert run(flush()) == (False, True)


def test_an_address_that_is_none() -> None:
    async def wrong() -> None:
        client = EngineClient("localhost 30000", RolloutClient())
        try:
            await client.generate(request())
        finally:
            await client.close()

    with pytest.raises(RolloutError, match="not the address of an engine"):
        run(wrong())


# -------------------------------------------------------------------------
# Engines that somebody else has started
# -------------------------------------------------------------------------


def test_an_engine_is_checked_before_it_is_used(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    tokenizer = tiny_tokenizer(ours, alphabet="0123456789+=")
    tiny_tokenizer(theirs, alphabet="=+9876543210")
    tokens = tuple(tokenizer.encode("12+3=", add_special_tokens=False))
    wanted = Expected(architectures=("Qwen3ForCausalLM",), tokens={"12+3=": tokens}, context_length=4096)

    async def check(server: FakeServer) -> Any:
        async with connected(server) as client:
            return await check_engine(client, wanted)

    with FakeServer(Options(model_path=str(ours))) as right:
        found = run(check(right))
    assert found == {
        "address": right.address,
        "model": str(ours),
        "tokenizer": str(ours),
        "version": "0.5.23",
    }
    other = Options(model_path=str(theirs), architecture="LlamaForCausalLM", context_length=1024)
    with FakeServer(other) as wrong, pytest.raises(RolloutError) as error:
        run(check(wrong))
    text = str(error.value)
    assert "LlamaForCausalLM; the run's model is a Qwen3ForCausalLM" in text
    assert "its context length is 1024 tokens; the run needs 4096" in text
    assert "of '12+3='" in text
