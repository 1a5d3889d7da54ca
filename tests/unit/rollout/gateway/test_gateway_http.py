"""HTTP that no client of OpenAI's or Anthropic's sends, and timeouts of both."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

ASK: Any = {"model": "policy", "messages": [{"role": "user", "content": "one"}]}


def test_requests_that_no_client_sends_get_an_error_of_the_api(serve: Any) -> None:
    async def main() -> None:
        async with serve([]) as served, httpx.AsyncClient(verify=False) as client:
            url, key = served.gateway.anthropic_url(served.session), served.gateway.key(served.session)
            for status, method, path, sent in (
                (400, "POST", "/v1/chat/completions", {"content": b"{"}),
                (400, "POST", "/v1/chat/completions", {"content": b"[1]"}),
                (400, "POST", "/v1/messages", {"content": b'{"messages": "\xff"}'}),
                (404, "POST", "/v1/embeddings", {"json": ASK}),
                (405, "GET", "/v1/messages", {}),
                (401, "POST", "/v1/messages", {"json": ASK, "headers": {b"x-api-key": b"ag.x.\xff"}}),
                (401, "POST", "/v1/messages", {"json": ASK, "headers": {b"x-api-key": b"ag.\xff.x"}}),
                (401, "POST", "/v1/chat/completions", {"json": ASK, "headers": {"x-api-key": ""}}),
            ):
                headers = sent.pop("headers", {"x-api-key": key})
                answer = await client.request(method, url + path, headers=headers, **sent)
                body = answer.json()
                assert answer.status_code == status, (path, body)
                assert body["error"]["message"]
                assert (body.get("type") == "error") == ("messages" in path)
            assert served.session.turns == []

    asyncio.run(main())


def test_a_generation_that_takes_too_long_is_ended(serve: Any, anthropic: Any) -> None:
    async def main() -> None:
        async with serve(["four", "four"], timeout_s=0.02) as served:
            served.generator.hold.clear()
            async with served.openai(max_retries=0) as client:
                with pytest.raises(openai.InternalServerError, match=r"rollout\.gateway\.timeout_s") as late:
                    await client.chat.completions.create(**ASK)
            async with served.anthropic(max_retries=0) as client:
                with pytest.raises(anthropic.InternalServerError) as also_late:
                    await client.messages.create(**ASK, max_tokens=9)
            assert (late.value.status_code, also_late.value.status_code) == (504, 504)
            assert len(served.generator.cancelled) == 2
            assert served.samples == []

    asyncio.run(main())


def test_many_connect_while_the_loop_is_busy(serve: Any) -> None:
    async def main() -> None:
        async with serve([]) as served:
            port = urlsplit(served.gateway.address).port
            with ExitStack() as stack:
                sockets = [stack.enter_context(socket.socket()) for _ in range(300)]
                for each in sockets:
                    each.settimeout(0.5)  # the kernel tries again after a second
                    each.connect(("127.0.0.1", port))

    asyncio.run(main())


def test_models_as_each_api_lists_them(serve: Any, anthropic: Any) -> None:
    async def main() -> None:
        async with serve([], models=["Qwen/Qwen3-0.6B", "policy"]) as served:
            async with served.openai() as client:
                assert [each.id async for each in client.models.list()] == ["Qwen/Qwen3-0.6B", "policy"]
                assert (await client.models.retrieve("Qwen/Qwen3-0.6B")).owned_by == "anygauge"
            async with served.anthropic() as client:
                found = await client.models.retrieve("policy")
                assert (found.id, found.type, found.display_name) == ("policy", "model", "policy")
                with pytest.raises(anthropic.NotFoundError):
                    await client.models.retrieve("other")

    asyncio.run(main())


def test_characters_that_are_divided_among_tokens(serve: Any, tokenizer: Any) -> None:
    """A stream shows whole characters alone, and no token claims bytes that are not its own."""

    async def main() -> None:
        async with serve(["a \N{SLIGHTLY SMILING FACE}"] * 2) as served, served.openai() as client:
            whole = await client.chat.completions.create(**ASK, logprobs=True)
            stream = await client.chat.completions.create(**ASK, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(pieces) == whole.choices[0].message.content == "a \N{SLIGHTLY SMILING FACE}"
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
            tokens = whole.choices[0].logprobs.content
            assert [each.bytes for each in tokens[:2]] == [[97], [32]]
            assert len(tokens) > 3
            assert {each.bytes is None for each in tokens[2:]} == {True}

    asyncio.run(main())


def test_the_helpers_of_openais_client(serve: Any) -> None:
    async def main() -> None:
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        function = {"name": "weather", "strict": True, "parameters": {"type": "object"}}
        tool = {"type": "function", "function": function}
        async with serve([f"Look: {call}"]) as served, served.openai() as client:
            async with client.chat.completions.stream(**ASK, tools=[tool]) as stream:
                kinds = {event.type async for event in stream}
                reply = await stream.get_final_completion()
            assert {"chunk", "content.delta", "tool_calls.function.arguments.done"} <= kinds
            [asked] = reply.choices[0].message.tool_calls
            assert (asked.function.name, asked.function.arguments) == ("weather", '{"city": "Paris"}')
            assert len(served.samples) == 1

    asyncio.run(main())
