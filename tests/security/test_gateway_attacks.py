"""Attacks on the gateway: by the policy's text, by requests of an agent, and by whoever reaches its port."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import types
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import httpx
import orjson
import pytest
from aiohttp import web
from aiohttp.compression_utils import ZLibDecompressor
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anygauge.rollout import multi_turn
from anygauge.rollout.gateway import anthropic_api, openai_api, server
from anygauge.rollout.gateway import session as session_module
from anygauge.rollout.gateway.agent import agent
from anygauge.rollout.gateway.answers import answer_of
from anygauge.rollout.gateway.images import Images
from anygauge.rollout.gateway.messages import Chat, Message
from anygauge.rollout.gateway.rendering import Renderer
from anygauge.rollout.gateway.request_parsing import ChatRequest
from anygauge.rollout.gateway.response_parsing import Style, read
from anygauge.rollout.gateway.sampling import Choice
from anygauge.rollout.gateway.session import Session
from anygauge.rollout.gateway.tool_formats import FORMATS, Called, ToolFormat
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_hooks.rollout import GenerateRequest
from anygauge_tests.scripted_gateway import ScriptedRollout, Served, chat_tokenizer, serve_script

PROMPT = Prompt(index=7, tokens=(1,), text="the weather?")
QUESTION = {"role": "user", "content": "the weather?"}
OPENAI: dict[str, Any] = {"model": "policy", "messages": [QUESTION]}
ANTHROPIC: dict[str, Any] = {**OPENAI, "max_tokens": 100_000}
TOOL = {"name": "get", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
CONTEXT = 1000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def call_of(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "get", "arguments": {{"a": {arguments}}}}}\n</tool_call>'


# -----------------------------------------------------------------------------
# What the policy writes
# -----------------------------------------------------------------------------

ODD_ARGUMENTS = {
    "1100 brackets": nested(1100),
    "300 brackets": nested(300),
    "95 brackets": nested(95),
    "unclosed brackets": "[" * 5000,
    "objects": '{"a":' * 1100 + "1" + "}" * 1100,
    "not a number": "NaN",
    "infinity": "[-Infinity]",
    "beyond any float": "1e999",
    "a large integer": "9" * 40,
    "too large an integer": "9" * 5000,
    "half a surrogate pair": '"\\ud800"',
    "a pair of surrogates": '"\\ud83d\\ude42"',
    "equal keys": '{"b": 1, "b": 2}',
}
"""After ``"a":`` in the arguments of a call."""


async def tool_loop(base_url: str, api_key: str, row: Any, *, api: str, stream: bool) -> float:
    """Ask, send back what was said with the result of each call, ask again, and score."""
    async with httpx.AsyncClient(verify=False, headers={"x-api-key": api_key}) as client:
        talk = openai_turn if api == "openai" else anthropic_turn
        said = await talk(client, base_url, [QUESTION], stream)
        await talk(client, base_url, [QUESTION, *said], stream)
    return 0.25


async def openai_turn(client: Any, url: str, messages: Any, stream: bool) -> list[Any]:
    body = {**OPENAI, "messages": messages, "tools": [FUNCTION], "stream": stream}
    reply = await client.post(f"{url}/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
        assert not [event for event in events if "error" in event]
        deltas = [event["choices"][0]["delta"] for event in events]
        content = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    else:
        [choice] = reply.json()["choices"]
        content, calls = choice["message"]["content"], choice["message"].get("tool_calls", [])
    for call in calls:
        json.loads(call["function"]["arguments"])
    said = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    return [said, *(results or [QUESTION])]


async def anthropic_turn(client: Any, url: str, messages: Any, stream: bool) -> list[Any]:
    body = {**ANTHROPIC, "messages": messages, "tools": [TOOL], "stream": stream}
    reply = await client.post(f"{url}/messages", json=body)
    assert reply.status_code == 200, reply.text
    if stream:
        assert "event: message_stop" in reply.text
        assert "event: error" not in reply.text
        return [{"role": "assistant", "content": "so"}, QUESTION]
    blocks = orjson.loads(reply.content)["content"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert all(isinstance(call["input"], dict) for call in calls)
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"} for call in calls]
    content = results or "and tomorrow?"
    # As the real client does, with all the digits of an integer.
    return [{"role": "assistant", "content": reply.json()["content"]}, {"role": "user", "content": content}]


@pytest.fixture(autouse=True)
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("attacked_agents")
    module.tool_loop = tool_loop  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attacked_agents", module)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["openai", "anthropic"])
@pytest.mark.parametrize("name", ODD_ARGUMENTS)
def test_whatever_a_call_holds_the_rollout_is_scored(
    tokenizer: Any, name: str, api: str, stream: bool
) -> None:
    rollout = ScriptedRollout(PROMPT, tokenizer, [call_of(ODD_ARGUMENTS[name]), "sunny"], budget=50_000)
    options = {"api": api, "stream": stream}
    done = agent(rollout, PROMPT, 5, agent="attacked_agents:tool_loop", agent_options=options)
    samples = asyncio.run(done)
    assert {sample.reward for sample in samples} == {0.25}
    assert len(rollout.generator.requests) == 2, "a client that gets an error asks again"
    trained = sum(sum(sample.loss_mask) for sample in samples)
    assert trained == sum(len(each.tokens) for each in rollout.generator.sampled)


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", '{"name": "get", "arguments": ', "}", "[", "{", '"', "\\", "\n", "get"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=get>", "</function>", "NaN"),
    *("<parameter=a>", "</parameter>", "\\ud800", "<think>", "</think>", "\ufffd", "\0", "\u202e", "1e999"),
    *(part for part in FORMATS["deepseek"][:2]),
    *(
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
    ),
    nested(150),
    "9" * 4400,
)
written = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=12).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(body=written, between_markers=st.booleans())
@example(body='{"name": "get", "arguments": {"a": 123456789012345678901234567890}}', between_markers=True)
def test_any_text_becomes_an_answer_of_both_apis(
    tokenizer: Any, name: str, body: str, between_markers: bool
) -> None:
    form = FORMATS[name]
    text = form.start + body + form.end if between_markers else body
    tokens = tokenizer.encode(text, add_special_tokens=False)
    request = GenerateRequest("r", (1,), SamplingParams(max_new_tokens=len(tokens) + 1), 0)
    style = Style(think=True, tools=form, schemas={"get": {"properties": {"a": {"type": "string"}}}})
    renderer = Renderer(tokenizer, spoken=(form.start, form.end))
    choice = Choice(request, list(tokens), [0.0] * len(tokens), [0] * len(tokens), "stop")
    answer = answer_of(0, choice, renderer, style, "r", log_probs=True)
    ask = ChatRequest("policy", Chat((Message("user", "one"),)))
    for told in (openai_api.completion("c", 0, ask, [answer]), anthropic_api.message("m", ask, answer)):
        json.dumps(told, allow_nan=False).encode()
    for call in answer.calls:
        assert isinstance(json.loads(call.arguments), dict)
    # The agent sends it back, so that the template shows it again.
    chat = Chat((Message("user", "one"), answer.message(), Message("user", "two")))
    renderer.encode(renderer.render(chat, generate=True))


PAIRS = {
    "glm": "<arg_key>a</arg_key><arg_value>b",
    "xml": "<parameter=a>",
    "deepseek": "<\uff5ctool\u2581call\u2581begin\uff5c>get",
    "hermes": '[{"a":',
}


@pytest.mark.parametrize("name", FORMATS)
def test_unclosed_pairs_are_read_in_linear_time(name: str) -> None:
    """With 4 MB, time that grows with the square would outlast the suite's limit many times over."""
    form = FORMATS[name]
    head = {"glm": "get", "xml": "<function=get>"}.get(name, "")
    tail = "</function>" if name == "xml" else ""
    text = form.start + head + PAIRS[name] * (4_000_000 // len(PAIRS[name])) + tail + form.end
    blocks = read(text, Style(think=False, tools=form))
    assert [block.kind for block in blocks] == ["text"]


def breaks(text: str, schemas: Any) -> list[Called]:
    raise ZeroDivisionError


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_format_that_breaks_is_an_answer_with_an_error(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, ["so <tool_call>x</tool_call> it is"]) as served:
            body = {**OPENAI, "tools": [FUNCTION], "stream": stream}
            reply = await post(served, "/v1/chat/completions", body)
            assert reply.status_code == 500
            assert "ZeroDivisionError" in reply.json()["error"]["message"]

    monkeypatch.setitem(FORMATS, "hermes", ToolFormat("<tool_call>", "</tool_call>", breaks, "<tool_call>"))  # type: ignore[arg-type]
    asyncio.run(main())


def test_a_tool_that_fails_on_deep_json_tells_the_policy() -> None:
    result = asyncio.run(multi_turn._result(json.loads, nested(5000)))
    assert result.text.startswith("error: maximum recursion depth")


# -----------------------------------------------------------------------------
# What an agent sends
# -----------------------------------------------------------------------------


async def post(served: Served, path: str, body: Any) -> httpx.Response:
    url, key = served.gateway.anthropic_url(served.session), served.gateway.key(served.session)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(verify=False) as client:
        return await client.post(url + path, content=content, headers={"x-api-key": key})


DEEP = '{"a":' * 1000 + "1" + "}" * 1000


def with_message(body: dict[str, Any], role: str, **fields: Any) -> dict[str, Any]:
    return {**body, "messages": [QUESTION, {"role": role, **fields}, QUESTION]}


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "get", "arguments": "DEEP"}}
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "the type of a block": (MESSAGES, with_message(ANTHROPIC, "assistant", content=[{"type": {"a": 1}}])),
    "the type of a question's block": (
        MESSAGES,
        with_message(ANTHROPIC, "user", content=[{"type": {"a": 1}}]),
    ),
    "openai's type of a block": (CHAT, with_message(OPENAI, "user", content=[{"type": {"a": 1}}])),
    "too many stop strings": (CHAT, {**OPENAI, "stop": [str(number) for number in range(100)]}),
    "a long stop string": (MESSAGES, {**ANTHROPIC, "stop_sequences": ["a" * 2000]}),
    "deep content": (CHAT, with_message(OPENAI, "user", content="DEEP")),
    "deep template options": (CHAT, {**OPENAI, "chat_template_kwargs": {"a": "DEEP"}}),
    "deep arguments": (CHAT, with_message(OPENAI, "assistant", tool_calls=[TOOL_CALL])),
    "deep tools": (CHAT, {**OPENAI, "tools": [{**FUNCTION, "x": "DEEP"}]}),
    "anthropic's deep content": (MESSAGES, with_message(ANTHROPIC, "user", content="DEEP")),
    "anthropic's deep template options": (MESSAGES, {**ANTHROPIC, "chat_template_kwargs": {"a": "DEEP"}}),
    "anthropic's deep input": (
        MESSAGES,
        with_message(ANTHROPIC, "assistant", content=[{"type": "tool_use", "name": "get", "input": "DEEP"}]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_of_a_wrong_shape_is_refused(
    tokenizer: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, body = WRONG[name]

    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            reply = await post(served, path, json.dumps(body).replace('"DEEP"', DEEP).encode())
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["message"]

    asyncio.run(main())
    assert not caplog.records


@pytest.mark.parametrize("place", ["x", "chat_template_kwargs"])
def test_more_values_than_any_chat_has_are_refused(tokenizer: Any, place: str) -> None:
    """Parsing 8 MiB of empty lists held up every other agent for seconds, and took 200 MB."""

    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            text = json.dumps({**OPENAI, place: {"a": "MANY"}})
            many = b"[" + b"[]," * 100_000 + b"0]"
            reply = await post(served, CHAT, text.encode().replace(b'"MANY"', many))
            assert reply.status_code == 400, reply.text
            assert "more than 100000 values" in reply.json()["error"]["message"]

    asyncio.run(main())


def test_images_are_marked_in_linear_time(tokenizer: Any) -> None:
    """Marked one after the other in a text of 3.7 MB, they would be copied for minutes."""

    async def look(_: Any) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        return (5,), (Media(kind="image", key="1", spans=((0, 1),), grid=(1, 1, 1)),)

    images = Images(Renderer(tokenizer), look, reserved=(5,))
    block = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = with_message(OPENAI, "user", content=[{"type": "text", "text": "so"}, *[block] * 100_000])
    chat = asyncio.run(images.marked(openai_api.parse_request(body).chat))
    mark = tokenizer.decode([5])
    assert chat.messages[1].content == "so" + mark * 100_000


def test_results_of_tools_are_told_apart_in_linear_time(tokenizer: Any) -> None:
    """Each compared with each would be 5e9 comparisons."""
    results = [{"type": "tool_result", "tool_use_id": str(number)} for number in range(50_000)]
    texts = [{"type": "text", "text": ""}] * 50_000
    chat = anthropic_api.chat_of(with_message(ANTHROPIC, "user", content=[*results, *texts]))
    assert len(chat.messages) == 50_003


LONG = "a" * (16 * CONTEXT)
TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "content": (CHAT, {**OPENAI, "messages": [{"role": "user", "content": LONG}]}),
    "parts": (CHAT, with_message(OPENAI, "user", content=[{"type": "text", "text": "a" * 1600}] * 10)),
    "messages without a word": (
        CHAT,
        {**OPENAI, "messages": [{"role": "user", "content": ""}] * (CONTEXT + 1)},
    ),
    "reasoning": (CHAT, with_message(OPENAI, "assistant", content="", reasoning_content=LONG)),
    "arguments": (
        CHAT,
        with_message(OPENAI, "assistant", tool_calls=[{"function": {"name": "get", "arguments": LONG}}]),
    ),
    "schemas": (CHAT, {**OPENAI, "tools": [{"type": "function", "function": {"name": "g", "x": LONG}}]}),
    "template options": (CHAT, {**OPENAI, "chat_template_kwargs": {"a": LONG}}),
    "a system prompt": (MESSAGES, {**ANTHROPIC, "system": LONG}),
    "counted tokens": ("/v1/messages/count_tokens", {**ANTHROPIC, "system": LONG}),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_cannot_fit_is_refused_before_it_is_rendered(
    tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = TOO_LONG[name]

    async def main() -> None:
        async with serve_script(tokenizer, ["yes"], max_context_tokens=CONTEXT) as served:
            with monkeypatch.context() as patch:
                for work in ("apply_chat_template", "encode"):
                    patch.setattr(
                        tokenizer, work, partial(pytest.fail, f"{work} of a prompt that is too long")
                    )
                reply = await post(served, path, body)
            assert reply.status_code == 400, reply.text
            assert "characters" in reply.json()["error"]["message"]
            assert served.session.spent == ("count_tokens" not in path)
            assert (await post(served, CHAT, OPENAI)).status_code == 200

    asyncio.run(main())


async def shows_a_large_file(base_url: str, api_key: str, row: Any, *, size: int) -> None:
    async with httpx.AsyncClient(verify=False, headers={"x-api-key": api_key}) as client:
        await openai_turn(client, base_url, [QUESTION], False)
        body = with_message(OPENAI, "user", content="a" * size)
        (await client.post(f"{base_url}/chat/completions", json=body)).raise_for_status()


@pytest.mark.parametrize("size", [16_000, 9 << 20], ids=["characters", "bytes"])
def test_an_agent_whose_prompt_grew_too_long_is_scored_as_far_as_it_got(
    tokenizer: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["attacked_agents"], "shows", shows_a_large_file, raising=False)
    rollout = ScriptedRollout(PROMPT, tokenizer, ["rainy"], context=CONTEXT)
    options = {"size": size}
    [sample] = asyncio.run(agent(rollout, PROMPT, 5, agent="attacked_agents:shows", agent_options=options))
    assert sample.text == "rainy"


async def asks_on(base_url: str, api_key: str, row: Any) -> float:
    """Ask for tokens when none are left, each time with another prompt, and then more often than may be."""
    headers = {"x-api-key": api_key}
    async with httpx.AsyncClient(verify=False, headers=headers) as client:
        for number, status in enumerate([200, 400, 400, 400, 429]):
            body = {**OPENAI, "messages": [{"role": "user", "content": str(number)}]}
            reply = await client.post(f"{base_url}/chat/completions", json=body)
            assert reply.status_code == status, reply.text
    assert reply.json()["error"]["code"] == "too_many_failed_requests"
    return 0.25


def test_an_agent_that_asks_on_without_a_budget_is_bounded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []

    class Recorded(Session):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sessions.append(self)

    monkeypatch.setattr(server, "Session", Recorded)
    monkeypatch.setattr(session_module, "MOST_FAILURES", 3)
    monkeypatch.setattr(sys.modules["attacked_agents"], "asks_on", asks_on, raising=False)
    rollout = ScriptedRollout(PROMPT, tokenizer, [("ab", "length")], budget=2)
    [sample] = asyncio.run(agent(rollout, PROMPT, 5, agent="attacked_agents:asks_on"))
    assert (sample.text, sample.reward) == ("ab", 0.25)
    [session] = sessions
    assert [len(each) for each in session._samplings.values()] == [1]
    assert all(isinstance(prompt, int) for prompt in session._drawn)


def test_a_generation_that_is_cancelled_has_failed(tokenizer: Any) -> None:
    """Also one that the end of the event loop cancels."""

    async def main() -> None:
        async with serve_script(tokenizer, ["four"]) as served:
            served.generator.hold.clear()
            asking = asyncio.ensure_future(post(served, CHAT, OPENAI))
            await served.generator.began.wait()
            [[sampling]] = served.session._samplings.values()
            sampling._task.cancel()
            assert (await asking).status_code == 503
            assert (served.session._failures, served.session._samplings) == (1, {})

    asyncio.run(asyncio.wait_for(main(), 30))


def test_templates_and_tokenizers_run_outside_of_the_event_loop(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"apply_chat_template": set(), "encode": set()}

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            threads[name].add(threading.get_ident())
            return work(*args, **kwargs)

        return run

    async def main() -> None:
        async with serve_script(tokenizer, ["yes", "no", "yes"]) as served:
            for name in threads:
                monkeypatch.setattr(tokenizer, name, noted(name, getattr(tokenizer, name)))
            served.generator._characters = lambda text: [1]  # type: ignore[method-assign]
            for path, body in (
                (CHAT, OPENAI),
                (MESSAGES, ANTHROPIC),
                ("/v1/messages/count_tokens", ANTHROPIC),
            ):
                assert (await post(served, path, body)).status_code == 200
        assert all(threads.values())
        assert not any(threading.get_ident() in known for known in threads.values())

    asyncio.run(main())


def test_slow_prompts_of_an_agent_leave_threads_to_others(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    apply = tokenizer.apply_chat_template

    def slow(messages: Any, **kwargs: Any) -> Any:
        if "slow" in str(messages):
            release.wait()
        return apply(messages, **kwargs)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        async with serve_script(tokenizer, lambda _: "yes") as served:
            monkeypatch.setattr(tokenizer, "apply_chat_template", slow)
            body = {**OPENAI, "messages": [{"role": "user", "content": "slow"}]}
            waiting = [asyncio.ensure_future(post(served, CHAT, body)) for _ in range(8)]
            try:
                while served.session.bodies._under_way < 8 * len(json.dumps(body)):
                    await asyncio.sleep(0)
                other = served.gateway.open(served.generator, seed=4)
                async with asyncio.timeout(10):
                    reply = await post(served._replace(session=other), CHAT, OPENAI)
                assert reply.status_code == 200
            finally:
                release.set()
            assert {reply.status_code for reply in await asyncio.gather(*waiting)} == {200}

    asyncio.run(main())


def test_a_thread_is_in_use_until_it_ends(tokenizer: Any) -> None:
    """An agent may go away and come again as often as it likes."""
    release = threading.Event()

    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            threads = served.session._threads
            running = [asyncio.ensure_future(served.session.in_thread(release.wait)) for _ in range(2)]
            while not threads.locked():
                await asyncio.sleep(0)
            for each in running:
                each.cancel()
            await asyncio.wait(running)
            assert threads.locked()
            release.set()
            assert await served.session.in_thread(release.is_set)

    asyncio.run(asyncio.wait_for(main(), 30))


# -----------------------------------------------------------------------------
# Whoever reaches the port
# -----------------------------------------------------------------------------


async def connect(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.gateway.address.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def head(served: Served, key: str, *headers: str) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: gateway", f"x-api-key: {key}", *headers, "", ""]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize(("known", "status"), [(False, b"401"), (True, b"413")])
def test_a_large_body_is_answered_before_it_is_sent(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, known: bool, status: bytes
) -> None:
    async def read(request: web.Request) -> bytes:
        raise AssertionError("nobody sends this body")

    monkeypatch.setattr(web.Request, "read", read)

    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            key = served.gateway.key(served.session) if known else "ag.x.y"
            reader, writer = await connect(served)
            writer.write(head(served, key, f"Content-Length: {60 << 20}"))
            assert status in await reader.readline()
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("sees_images", [False, True])
def test_text_beyond_the_context_is_not_even_parsed(tokenizer: Any, sees_images: bool) -> None:
    """As long as images are no part of the body, whose bytes say nothing of its text."""

    async def main() -> None:
        async with serve_script(tokenizer, ["yes"], max_context_tokens=CONTEXT) as served:
            if sees_images:
                served.session._images._look = lambda messages: pytest.fail("there is none")  # type: ignore[assignment]
            chat = {**OPENAI, "user": "a" * (6 * 16 * CONTEXT)}
            assert (await post(served, CHAT, chat)).status_code == (200 if sees_images else 413)
            assert served.session.spent != sees_images

    asyncio.run(main())


def test_a_body_without_a_length_is_read_up_to_the_limit(tokenizer: Any) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, [], max_body_bytes=1000) as served:
            reader, writer = await connect(served)
            key = served.gateway.key(served.session)
            writer.write(head(served, key, "Transfer-Encoding: chunked") + b"400\r\n" + b" " * 1024 + b"\r\n")
            assert b"413" in await reader.readline()
            assert b"rollout.gateway.max_body_bytes" in await reader.readuntil(b"}}")
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize("length", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_bodies_of_a_session_are_bounded_together(tokenizer: Any, length: str) -> None:
    """Each is within the limit of one body, and on a connection of its own."""

    async def main() -> None:
        async with serve_script(tokenizer, ["yes"], max_body_bytes=1000) as served:
            lines = head(served, served.gateway.key(served.session), length)
            uploads = [await connect(served) for _ in range(16)]
            for _, writer in uploads:
                writer.write(lines)
            while served.session.bodies._under_way < 16_000:
                await asyncio.sleep(0)
            refused = await post(served, CHAT, OPENAI)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert "bytes of requests" in refused.json()["error"]["message"]
            other = served.gateway.open(served.generator, seed=4)
            assert (await post(served._replace(session=other), CHAT, OPENAI)).status_code == 200
            for _, writer in uploads:
                writer.close()
            while served.session.bodies._under_way:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_body_counts_until_it_is_answered(tokenizer: Any) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, ["yes"]) as served:
            served.generator.hold.clear()
            asking = asyncio.ensure_future(post(served, CHAT, OPENAI))
            await served.generator.began.wait()
            assert served.session.bodies._under_way == len(json.dumps(OPENAI))
            served.generator.hold.set()
            assert (await asking).status_code == 200
            while served.session.bodies._under_way:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nx-api-key: a"])
def test_a_connection_without_a_header_is_closed(
    tokenizer: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            reader, writer = await connect(served)
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()

    monkeypatch.setattr(server, "_HEADER_TIMEOUT_S", 0.05)
    asyncio.run(main())


def test_a_body_that_does_not_come_is_not_waited_for(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            reader, writer = await connect(served)
            writer.write(head(served, served.gateway.key(served.session), "Content-Length: 100") + b"{")
            assert b"408" in await reader.readline()
            writer.close()

    monkeypatch.setattr(server, "_BODY_TIMEOUT_S", 0.05)
    asyncio.run(main())


def test_a_slow_generation_is_no_slow_header(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, ["four"]) as served:
            served.generator.hold.clear()
            asking = asyncio.ensure_future(post(served, CHAT, OPENAI))
            await served.generator.began.wait()
            await asyncio.sleep(0.2)  # many times the limit
            served.generator.hold.set()
            assert (await asking).status_code == 200

    monkeypatch.setattr(server, "_HEADER_TIMEOUT_S", 0.05)
    asyncio.run(main())


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionError):
        return await reader.read() == b""
    return True


def test_strangers_do_not_keep_agents_out(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many idle connections as there may be, and one that was refused and waits for the next request."""

    async def main() -> None:
        async with serve_script(tokenizer, ["yes"]) as served:
            refused, writer = await connect(served)
            writer.write(head(served, "ag.x.y", "Content-Length: 0"))
            assert b"401" in await refused.readuntil(b"}}")
            idle, others = await connect(served), [await connect(served) for _ in range(20)]
            assert (await post(served, CHAT, OPENAI)).status_code == 200
            assert await is_closed(refused)
            assert await is_closed(idle[0])
            for each in (writer, idle[1], *(each for _, each in others)):
                each.close()

    monkeypatch.setattr(server, "most_connections", lambda: 3)
    asyncio.run(main())


def test_agents_are_not_put_out_by_strangers(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, ["four", "four"]) as served:
            key = served.gateway.key(served.session)
            agents = [await connect(served) for _ in range(2)]
            for reader, writer in agents:
                writer.write(head(served, key, "Content-Length: 0"))
                assert b"400" in await reader.readuntil(b"}}")
            stranger, other = await connect(served)
            assert await is_closed(stranger)
            other.close()
            for reader, writer in agents:
                writer.write(head(served, key, "Content-Length: 0"))
                assert b"400" in await reader.readline()
                writer.close()

    monkeypatch.setattr(server, "most_connections", lambda: 2)
    asyncio.run(main())


def test_connections_that_come_at_once_are_bounded_too(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a descriptor, of which the driver may have no more than 1,024."""

    async def main() -> None:
        async with serve_script(tokenizer, []) as served, asyncio.timeout(30):
            host, port = served.gateway.address.removeprefix("http://").split(":")
            with ExitStack() as strangers:
                for _ in range(600):  # which the kernel takes, while the loop is busy here
                    strangers.enter_context(closing(socket.create_connection((host, int(port)))))
                counts = []
                for _ in range(100):
                    counts.append(len(os.listdir("/proc/self/fd")))
                    await asyncio.sleep(0)
            assert max(counts) - counts[0] < 200

    monkeypatch.setattr(server, "most_connections", lambda: 3)
    asyncio.run(main())


def test_connections_that_have_ended_are_forgotten(tokenizer: Any) -> None:
    """Also before the time for their header is over: strangers come and go without end."""

    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            for _ in range(5):
                (await connect(served))[1].close()
            connections = served.gateway._connections
            assert connections is not None
            while connections._num_open or connections._strangers or connections._silent:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(("known", "status"), [(False, b"401"), (True, b"415")])
def test_a_compressed_body_is_not_decompressed(tokenizer: Any, known: bool, status: bytes) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            key = served.gateway.key(served.session) if known else "ag.x.y"
            body = zlib.compress(bytes(1 << 20))
            reader, writer = await connect(served)
            sizes = f"Content-Length: {len(body)}", "Content-Encoding: deflate"
            writer.write(head(served, key, *sizes) + body)
            assert status in await reader.readline()
            writer.close()

    with patch.object(ZLibDecompressor, "decompress_sync", side_effect=zlib.error) as decompress:
        asyncio.run(main())
    assert not decompress.mock_calls


def test_garbage_is_not_logged(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            reader, writer = await connect(served)
            writer.write(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000)
            assert b"400" in await reader.readline()
            writer.close()

    asyncio.run(main())
    assert not caplog.records


def test_a_count_of_retries_of_any_length_is_read(tokenizer: Any) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, ["yes"]) as served:
            body = json.dumps(OPENAI).encode()
            reader, writer = await connect(served)
            sizes = f"Content-Length: {len(body)}", f"x-stainless-retry-count: {'1' * 5000}"
            writer.write(head(served, served.gateway.key(served.session), *sizes) + body)
            assert b"200" in await reader.readline()
            writer.close()

    asyncio.run(main())
