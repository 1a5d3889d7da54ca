"""Strangers at the port of a server: everything needs its keys, and nothing of the run shows them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from anygauge.config.schema import RolloutClient
from anygauge.config.validate import validate
from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.sglang import keys as sglang_keys
from anygauge.serving.sglang.client import EngineClient, channel
from anygauge.serving.sglang.keys import HiddenKey, key_problems, key_variable, own_keys, set_keys
from anygauge.serving.sglang.weights import SGLangPeer, SGLangTarget
from anygauge.weight_sync.control import RefusedError
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest
from anygauge_hooks.sglang import NO_KEYS, ServerKeys
from anygauge_tests.fake_engine import FakeServer, Options
from anygauge_tests.fake_engine.options import VERSIONS
from anygauge_tests.fake_engine.server import application
from anygauge_tests.http_requests import ask

KEYS = ServerKeys(api="the-key-of-the-run", admin="the-admin-key-of-the-run")
REQUEST = GenerateRequest("1-0-0", (5, 6, 7), SamplingParams(max_new_tokens=3), seed=1)
CLIENT = RolloutClient(pause_s=0.01, attempts=1)


@pytest.fixture(scope="module", params=VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    options = Options(sglang=request.param, api_key=KEYS.api, admin_api_key=KEYS.admin, token_s=0.001)
    with FakeServer(options) as running:
        yield running


async def paths(options: Options) -> list[tuple[str, str]]:
    """Return method and path of every endpoint of SGLang's that a fake engine has."""
    routes = application(options).router.routes()
    found = [(each.method, each.resource.canonical) for each in routes if each.resource is not None]
    return [(method, path) for method, path in found if not path.startswith("/fake/") and method != "HEAD"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": KEYS.api},
        {"authorization": f"Basic {KEYS.api}"},
        {"x-api-key": KEYS.api},
    ],
    ids=["nothing", "wrong", "empty", "no scheme", "other scheme", "other header"],
)
def test_an_engine_answers_no_stranger(server: FakeServer, headers: dict[str, str]) -> None:
    asked = asyncio.run(paths(server.options))
    assert len(asked) > 20
    before = server.state()["events"]
    answers = {
        path: ask(server.address + path, headers=headers, method=method).status for method, path in asked
    }
    free = {path for path, status in answers.items() if status != 401}
    assert free == {"/health", "/health_generate"}
    assert server.state()["events"] == before


def test_neither_key_stands_for_the_other(server: FakeServer) -> None:
    swapped = ServerKeys(api=KEYS.admin, admin=KEYS.api)
    for path in ("/generate", "/model_info", "/pause_generation", "/update_weights_from_disk"):
        assert ask(server.address + path, b"{}", swapped.headers(path)).status == 401


def test_the_run_shows_the_right_key_with_every_request_for_generation(server: FakeServer) -> None:
    async def work() -> None:
        client = EngineClient(server.address, CLIENT, keys=KEYS)
        try:
            assert (await client.generate(REQUEST)).tokens
            assert await client.model_info()
            assert await client.server_info()
            assert await client.is_answering()
            assert await client.is_healthy()
            await client.abort()
            assert await client.flush_cache()
            await client.move_memory("release", ["kv_cache"])
            await client.move_memory("resume", ["kv_cache"])
        finally:
            await client.close()

    asyncio.run(work())


def test_a_request_that_is_given_up_is_ended_in_the_engine(server: FakeServer) -> None:
    endless = REQUEST._replace(params=SamplingParams(max_new_tokens=100_000, ignore_eos=True))

    async def work() -> None:
        client = EngineClient(server.address, CLIENT, keys=KEYS)
        asked = asyncio.create_task(client.generate(endless))
        while not (await asyncio.to_thread(server.state))["requests"]:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await client.close()
        while (await asyncio.to_thread(server.state))["requests"]:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_the_run_shows_the_right_key_with_every_request_around_weights(server: FakeServer) -> None:
    peer = server.peer()
    control = SGLangTarget(peer, deadline_s=20)
    control.pause("abort")
    if peer.api.has_session:
        control.begin()
        control.end()
    assert control.version()
    for path in ("/update_weights_from_tensor", "/update_weights_from_disk", "/init_weights_update_group"):
        with pytest.raises(RefusedError) as caught:
            control.post(path, {}, what="nothing")
        assert "Unauthorized" not in str(caught.value), "what was asked for is wrong, and not who asks"
    control.resume()
    control.close()


def test_a_fleet_shows_each_engine_its_own_keys(server: FakeServer) -> None:
    async def generate(keys: ServerKeys) -> Any:
        fleet = EnginePool(CLIENT)
        fleet.add("engine-0", SGLangPeer(address=server.address, keys=keys))
        try:
            return await fleet.generate(REQUEST)
        finally:
            await fleet.close()

    assert asyncio.run(generate(KEYS)).tokens
    with pytest.raises(RolloutError, match=r"401.*Unauthorized"):
        asyncio.run(generate(NO_KEYS))


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.generate(REQUEST), lambda client: client.server_info()],
    ids=["generate", "server_info"],
)
def test_a_missing_key_is_an_error_that_names_the_keys_of_the_config(
    server: FakeServer, ask: Callable[[EngineClient], Awaitable[Any]]
) -> None:
    async def work() -> None:
        client = EngineClient(server.address, CLIENT)
        try:
            await ask(client)
        finally:
            await client.close()

    with pytest.raises(RolloutError, match=r"rollout\.api_key, rollout\.admin_api_key") as caught:
        asyncio.run(work())
    assert KEYS.api not in str(caught.value)


def test_a_refused_version_is_an_error(server: FakeServer) -> None:
    control = SGLangTarget(SGLangPeer(address=server.address), deadline_s=20)
    with pytest.raises(RefusedError, match="401"):
        control.version()
    control.close()


# ---- where keys come from, and where they are not ----


@dataclass
class Arguments:
    """Stands for SGLang's arguments, all of which it writes to its log."""

    api_key: str | None = None
    admin_api_key: str | None = None


class SealedArguments(Arguments):
    """Those of SGLang 0.5.17, which are changed by ``override`` alone."""

    _is_open = False

    def __setattr__(self, name: str, value: object) -> None:
        if not self._is_open:
            raise AttributeError(f"{name} assigned after resolution")
        object.__setattr__(self, name, value)

    def __init__(self) -> None:
        """Make them without an assignment."""

    def override(self, source: str, **fields: object) -> None:
        object.__setattr__(self, "_is_open", True)
        for name, value in fields.items():
            setattr(self, name, value)
        object.__setattr__(self, "_is_open", False)


def config(**rollout: object) -> Any:
    tree = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": ["d"]}, "rollout": rollout}
    checked = validate(tree)
    assert not checked.problems
    return checked.config


def test_every_server_of_a_run_has_random_keys_of_its_own() -> None:
    found = [own_keys(config()) for _ in range(3)]
    values = {key for each in found for key in (each.api, each.admin)}
    assert len(values) == 6
    assert all(len(key) == 64 for key in values)


def test_keys_of_the_environment_are_taken_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "from-the-environment")
    found = own_keys(config(api_key="$MY_KEY"))
    assert found.api == "from-the-environment"
    assert len(found.admin) == 64, "the other one is random"
    assert not list(key_problems(config(api_key="$MY_KEY")))


@pytest.mark.parametrize(
    ("written", "value", "said"),
    [
        ("sk-written-out", None, "write $NAME"),
        ("$MY_KEY or so", "x", "write $NAME"),
        ("$MY_KEY", None, "is not set"),
        ("$MY_KEY", "", "is not set"),
        ("$MY_KEY", "sk-written out", "visible ASCII"),
        ("$MY_KEY", "sk-wr\u00eftten", "visible ASCII"),
        ("$MY_KEY", "sk-written\n", "visible ASCII"),
    ],
)
def test_a_key_that_is_written_out_or_missing_is_refused_and_not_repeated(
    written: str, value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    (problem,) = key_problems(config(admin_api_key=written))
    assert problem.path == "rollout.admin_api_key"
    assert said in problem.hint
    assert "sk-" not in repr(problem)
    with pytest.raises(RolloutError) as caught:
        own_keys(config(admin_api_key=written))
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("arguments_class", [Arguments, SealedArguments])
def test_keys_show_in_no_text_of_what_holds_them(
    arguments_class: type[Arguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = SGLangPeer(address="http://127.0.0.1:9", secret="of-the-receiver", keys=KEYS)
    monkeypatch.setenv(sglang_keys.KEYS, key_variable(KEYS)[sglang_keys.KEYS])
    arguments = arguments_class()
    set_keys(arguments)
    for text in (repr(KEYS), repr(peer), f"{arguments=}", f"{vars(arguments)}"):
        assert KEYS.api not in text
        assert KEYS.admin not in text
        assert "of-the-receiver" not in text
    assert isinstance(arguments.api_key, HiddenKey)
    assert arguments.api_key == KEYS.api, "it is the key nevertheless"
    assert sglang_keys.KEYS not in os.environ, "what the server starts does not inherit it"


def test_an_answer_beyond_any_generation_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever answers at the address of an engine, the driver's memory is bounded."""
    sent: list[int] = []

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while sum(sent) < 64 * 2**20:
            await response.write(bytes(2**20))
            sent.append(2**20)
        return response

    async def main() -> None:
        server = TestServer(web.Application())
        server.app.router.add_post("/generate", endless)
        async with server:
            client = EngineClient(str(server.make_url("")), CLIENT)
            try:
                with pytest.raises(
                    RolloutError, match=r"answered POST /generate with more than 2097152 bytes"
                ):
                    await client.generate(REQUEST)
            finally:
                await client.close(farewell_s=0.0)

    monkeypatch.setattr(channel, "_LARGEST_ANSWER", 2 * 2**20)
    asyncio.run(main())
    assert sum(sent) < 64 * 2**20
