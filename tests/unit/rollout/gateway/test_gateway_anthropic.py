"""Anthropic's own client against the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("anthropic")
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name":  "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK = {"role": "user", "content": "the weather?"}
COMMON = {"model": "policy", "max_tokens": 400, "messages": [ASK], "system": "the assistant"}


def test_a_tool_loop_is_one_sample(serve: Any, tokenizer: Any) -> None:
    async def main() -> None:
        script = [f"<think>\nI look.\n</think>\n\nOne moment. {CALL}", "sunny"]
        async with serve(script) as served, served.anthropic() as client:
            thinking = {"type": "enabled", "budget_tokens": 1024}
            reply = await client.messages.create(**COMMON, tools=[WEATHER], thinking=thinking)
            assert reply.stop_reason == "tool_use"
            assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
            assert reply.content[0].thinking == "I look."
            assert reply.content[1].text == "One moment."
            assert (reply.content[2].name, reply.content[2].input) == ("weather", {"city": "Paris"})
            result = {
                "type": "tool_result",
                "tool_use_id": reply.content[2].id,
                "content": [{"type": "text", "text": "24 degrees"}],
            }
            messages = [
                ASK,
                {"role": "assistant", "content": [block.model_dump() for block in reply.content]},
                {"role": "user", "content": [result]},
            ]
            common = {**COMMON, "messages": messages, "tools": [WEATHER]}
            counted = await client.messages.count_tokens(
                **{key: common[key] for key in ("model", "system", "messages", "tools")}
            )
            last = await client.messages.create(**common)
            assert (last.stop_reason, last.content[0].text) == ("end_turn", "sunny")
            assert counted.input_tokens == last.usage.input_tokens
            one, two = served.generator.requests
            first = served.generator.sampled[0]
            between = two.tokens[len(one.tokens) + len(first.tokens) :]
            assert two.tokens == one.tokens + first.tokens + between
            assert tokenizer.decode(between).startswith("\n<|im_start|>user\n<tool_response>\n24 degrees")
            [sample] = served.samples
            assert sum(sample.loss_mask) == sum(len(each.tokens) for each in served.generator.sampled)

    asyncio.run(main())


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "the answer is four",
        "<think>\nI look.\n</think>\n\nOne moment. " + CALL + " then " + CALL + CALL,
        "<tool_call>\n{no json}\n</tool_call>",
        "",
    ],
)
def test_a_stream_says_what_a_whole_answer_says(serve: Any, text: str, thinking: bool) -> None:
    async def main() -> None:
        async with serve([text, text]) as served, served.anthropic() as client:
            ask: dict[str, Any] = {**COMMON, "tools": [WEATHER]}
            if thinking:
                ask["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            whole = await client.messages.create(**ask)
            async with client.messages.stream(**ask) as stream:
                events = [event.type async for event in stream]
                streamed = await stream.get_final_message()
            # Ids of calls tell the two generations apart.
            written = [
                [{**block.model_dump(), "id": ""} for block in each.content] for each in (whole, streamed)
            ]
            assert written[0] == written[1]
            assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
            assert (events[0], events[-1]) == ("message_start", "message_stop")
            assert events.count("content_block_start") == events.count("content_block_stop")

    asyncio.run(main())


def test_stop_reasons(serve: Any) -> None:
    async def main() -> None:
        async with serve(["abcdef", "ab STOP"]) as served, served.anthropic() as client:
            cut = await client.messages.create(**{**COMMON, "max_tokens": 3})
            assert (cut.content[0].text, cut.stop_reason) == ("abc", "max_tokens")
            stopped = await client.messages.create(**COMMON, stop_sequences=["no", "STOP"])
            assert (stopped.content[0].text, stopped.stop_reason) == ("ab ", "stop_sequence")
            assert stopped.stop_sequence == "STOP"

    asyncio.run(main())


def test_one_call_at_a_time(serve: Any) -> None:
    async def main() -> None:
        async with serve([CALL]) as served, served.anthropic() as client:
            choice = {"type": "auto", "disable_parallel_tool_use": True}
            reply = await client.messages.create(**COMMON, tools=[WEATHER], tool_choice=choice)
            assert reply.stop_reason == "tool_use"
            assert served.generator.requests[0].params.stop == ("</tool_call>",)

    asyncio.run(main())


def test_what_is_refused(serve: Any, anthropic: Any) -> None:
    async def main() -> None:
        async with serve([], sampling="refuse") as served, served.anthropic(max_retries=0) as client:
            for status, kind, changed in (
                (404, "not_found_error", {"model": "claude-opus"}),
                (400, "invalid_request_error", {"extra_body": {"temperature": 0.5}}),
                (400, "invalid_request_error", {"messages": []}),
                (
                    400,
                    "invalid_request_error",
                    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
                ),
                (400, "invalid_request_error", {"messages": [ASK, {"role": "assistant", "content": "It"}]}),
                (400, "invalid_request_error", {"tools": [WEATHER], "tool_choice": {"type": "any"}}),
                (400, "invalid_request_error", {"extra_body": {"mcp_servers": [{}]}}),
                (400, "invalid_request_error", {"output_config": {"format": {"type": "json_schema"}}}),
                (400, "invalid_request_error", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
            ):
                with pytest.raises(anthropic.APIStatusError) as caught:
                    await client.messages.create(**{**COMMON, **changed})
                assert caught.value.status_code == status
                assert caught.value.body["type"] == "error"
                assert caught.value.body["error"]["type"] == kind
            async with served.anthropic(api_key="guessed") as stranger:
                with pytest.raises(anthropic.AuthenticationError):
                    await stranger.messages.create(**COMMON)
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert served.generator.requests == []

    asyncio.run(main())
