"""OpenAI's own client against the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from anygauge.rollout.gateway.rendering import Renderer
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name":  "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASK = {"role": "user", "content": "the weather?"}


def test_an_answer(serve: Any) -> None:
    async def main() -> None:
        async with serve(["the answer is four"]) as served, served.openai() as client:
            reply = await client.chat.completions.create(model="policy", messages=[ASK], logprobs=True)
            assert reply.choices[0].message.content == "the answer is four"
            assert reply.choices[0].finish_reason == "stop"
            assert [each.token for each in reply.choices[0].logprobs.content] == list("the answer is four")
            assert reply.choices[0].logprobs.content[0].logprob == -1 / 1024
            assert reply.usage.completion_tokens == len("the answer is four") + 1
            assert reply.usage.prompt_tokens == len(served.generator.requests[0].tokens)
            [sample] = served.samples
            assert sample.prompt_tokens == served.generator.requests[0].tokens
            assert sample.response_tokens == served.generator.sampled[0].tokens
            assert set(sample.loss_mask) == {1}

    asyncio.run(main())


@pytest.mark.parametrize("asked", [False, True])
def test_tokens_are_decoded_one_by_one_only_if_their_log_probs_are_asked_for(
    serve: Any, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """The event loop decodes, 3 microseconds for each token."""
    decoded: list[int] = []
    decode = Renderer.decode

    def watched(renderer: Renderer, tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return decode(renderer, tokens)

    async def main() -> None:
        async with serve(["the answer is four"]) as served, served.openai() as client:
            reply = await client.chat.completions.create(model="policy", messages=[ASK], logprobs=asked)
            assert (reply.choices[0].logprobs is not None) == asked

    monkeypatch.setattr(Renderer, "decode", watched)
    asyncio.run(main())
    assert decoded.count(1) == len("the answer is four") * asked


def test_a_tool_loop_is_one_sample_with_the_very_tokens(serve: Any, tokenizer: Any) -> None:
    async def main() -> None:
        script = [f"<think>\nI look.\n</think>\n\nOne moment. {CALL}", "<think>\nFine.\n</think>\n\nsunny"]
        async with serve(script) as served, served.openai() as client:
            messages: list[Any] = [ASK]
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
            message = reply.choices[0].message
            assert reply.choices[0].finish_reason == "tool_calls"
            assert message.content == "One moment."
            assert message.reasoning_content == "I look."
            [call] = message.tool_calls
            assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
            # As agents do: the reasoning is dropped, the arguments are spelled anew.
            messages += [
                {
                    "role": "assistant",
                    "content": "One moment.",
                    "tool_calls": [
                        {
                            "id": call.id,
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{ "city":"Paris" }'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": call.id, "content": "24 degrees"},
            ]
            await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])
            first, second = served.generator.sampled
            one, two = served.generator.requests
            between = two.tokens[len(one.tokens) + len(first.tokens) :]
            assert two.tokens == one.tokens + first.tokens + between
            assert tokenizer.decode(between) == (
                "\n<|im_start|>user\n<tool_response>\n24 degrees\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            [sample] = served.samples
            assert sample.prompt_tokens == one.tokens
            assert sample.response_tokens == first.tokens + between + second.tokens
            mask = [1] * len(first.tokens) + [0] * len(between) + [1] * len(second.tokens)
            assert sample.loss_mask == tuple(mask)
            assert sample.log_probs == first.log_probs + (0.0,) * len(between) + second.log_probs

    asyncio.run(main())


async def streamed(stream: Any) -> tuple[dict[str, str], list[Any]]:
    """Return all that a stream says, by kind, and its chunks."""
    said = {"content": "", "reasoning": "", "calls": "", "finish": ""}
    chunks = []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            said["content"] += choice.delta.content or ""
            said["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                said["calls"] += f"{call.index}{call.function.name}{call.function.arguments}"
            said["finish"] += choice.finish_reason or ""
    return said, chunks


@pytest.mark.parametrize(
    "text",
    [
        "the answer is four",
        "  spaces \n around \n",
        "<think>\nI look.\n</think>\n\nOne moment. " + CALL + CALL,
        CALL,
        "<think>never closed",
        "<tool_call>\n{no json}\n</tool_call> and " + CALL + " after",
        "<tool_call>\nnever closed",
        "a < b <tool",
        "é € 🙂",
        "",
    ],
)
def test_a_stream_says_what_a_whole_answer_says(serve: Any, text: str) -> None:
    async def main() -> None:
        async with serve([text, text]) as served, served.openai() as client:
            ask = {"model": "policy", "messages": [ASK], "tools": [WEATHER]}
            whole = (await client.chat.completions.create(**ask)).choices[0]
            stream = await client.chat.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            )
            said, chunks = await streamed(stream)
            assert said["content"] == (whole.message.content or "")
            assert said["reasoning"] == (getattr(whole.message, "reasoning_content", None) or "")
            calls = whole.message.tool_calls or []
            assert said["calls"] == "".join(
                f"{number}{call.function.name}{call.function.arguments}" for number, call in enumerate(calls)
            )
            assert said["finish"] == whole.finish_reason
            assert chunks[-1].usage.completion_tokens == len(served.generator.sampled[1].tokens)
            assert [turn.message.meaning() for turn in served.session.turns[:1]] == [
                served.session.turns[1].message.meaning()
            ]

    asyncio.run(main())


def test_several_answers_are_several_samples(serve: Any) -> None:
    async def main() -> None:
        async with serve(["one", "two", "three"]) as served, served.openai() as client:
            reply = await client.chat.completions.create(model="policy", messages=[ASK], n=3)
            assert [choice.message.content for choice in reply.choices] == ["one", "two", "three"]
            assert len({request.seed for request in served.generator.requests}) == 3
            assert [sample.response_tokens for sample in served.samples] == [
                each.tokens for each in served.generator.sampled
            ]

    asyncio.run(main())


def test_limits_and_stops(serve: Any) -> None:
    async def main() -> None:
        async with serve(["abcdef", "ab STOP", "x"]) as served, served.openai() as client:
            create = client.chat.completions.create
            reply = await create(model="policy", messages=[ASK], max_completion_tokens=3)
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("abc", "length")
            reply = await create(model="policy", messages=[ASK], stop=["STOP"])
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("ab ", "stop")
            await create(model="policy", messages=[ASK], temperature=0.1, seed=5)
            assert served.generator.requests[2].params.temperature == 1.0
            assert served.generator.requests[2].seed == 5
            assert [len(sample.response_tokens) for sample in served.samples] == [3, 7, 2]

    asyncio.run(main())


def test_what_is_refused(serve: Any) -> None:
    async def main() -> None:
        options = {"sampling": "refuse", "max_context_tokens": 40}
        async with serve([], **options) as served, served.openai(max_retries=0) as client:

            async def refused(**changed: Any) -> openai.APIStatusError:
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(**{"model": "policy", "messages": [ASK], **changed})
                return caught.value

            unknown = await refused(model="gpt-4o")
            assert (unknown.status_code, unknown.code, unknown.param) == (404, "model_not_found", "model")
            for changed in (
                {"temperature": 0.5},
                {"presence_penalty": 1.0},
                {"messages": []},
                {"messages": [{"role": "robot", "content": "x"}]},
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                    ]
                },
                {"response_format": {"type": "json_object"}},
                {"tools": [WEATHER], "tool_choice": "required"},
                {"top_logprobs": 3, "logprobs": True},
                {"n": 0},
                {"n": 1000},
                {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
                {"extra_body": {"messages": "text"}},
                {"extra_body": {"tools": [3]}},
                {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
                {"max_tokens": True},
                {"extra_body": {"stop": [1]}},
                {"extra_body": {"min_tokens": 5}},
                {"extra_body": {"guided_json": {"type": "object"}}},
            ):
                error = await refused(**changed)
                assert error.status_code == 400, changed
                assert error.type == "invalid_request_error"
            long = await refused(messages=[{"role": "user", "content": "long " * 50}])
            assert (long.status_code, long.code) == (400, "context_length_exceeded")
            assert served.generator.requests == []

    asyncio.run(main())


def test_an_engine_that_fails_is_asked_again(serve: Any) -> None:
    async def main() -> None:
        async with serve(["four"]) as served, served.openai() as client:
            served.generator.failure = RolloutError("The engine is away.")
            reply = await client.chat.completions.create(model="policy", messages=[ASK])
            assert reply.choices[0].message.content == "four"
            assert served.session.failure is None
            assert len(served.samples) == 1
            served.generator.failure = RolloutError("The engine is away.")
            with pytest.raises(openai.InternalServerError, match="The engine is away") as caught:
                await client.with_options(max_retries=0).chat.completions.create(
                    model="policy", messages=[ASK], stream=True
                )
            assert caught.value.status_code == 503
            assert isinstance(served.session.failure, RolloutError)

    asyncio.run(main())


def test_keys_and_sessions(serve: Any) -> None:
    async def main() -> None:
        async with serve(["four"]) as served:
            other = served.gateway.open(served.generator, seed=1, name="other")
            for options in (
                {"api_key": "sk-guessed"},
                {"api_key": "ag.other."},
                {"api_key": served.gateway.key(other)},
                {"default_headers": {"x-session-id": "other"}, "base_url": f"{served.gateway.address}/v1"},
            ):
                async with served.openai(**options) as client:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
            async with served.openai(base_url=f"{served.gateway.address}/v1") as client:
                assert [model.id async for model in client.models.list()] == ["policy"]
                assert (await client.models.retrieve("policy")).id == "policy"
                with pytest.raises(openai.NotFoundError):
                    await client.models.retrieve("other")
                with pytest.raises(openai.NotFoundError, match="here are /v1/chat/completions"):
                    await client.responses.create(model="policy", input="x")
                await served.gateway.end(served.session)
                with pytest.raises(openai.NotFoundError):
                    await client.models.list()

    asyncio.run(main())


def test_more_requests_than_allowed(serve: Any) -> None:
    async def main() -> None:
        async with serve(["one", "two"], max_requests=1) as served, served.openai(max_retries=0) as client:
            served.generator.hold.clear()
            ask = {"model": "policy", "messages": [ASK]}
            first = asyncio.create_task(client.chat.completions.create(**ask))
            await served.generator.began.wait()
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**ask)
            assert caught.value.response.headers["retry-after"] == "1"
            served.generator.hold.set()
            assert (await first).choices[0].message.content == "one"
            assert (await client.chat.completions.create(**ask)).choices[0].message.content == "two"

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_goes_away_ends_the_generation(serve: Any, stream: bool) -> None:
    async def main() -> None:
        async with serve(["the answer", "four"]) as served, served.openai(max_retries=0) as client:
            served.generator.hold.clear()
            ask = {"model": "policy", "messages": [ASK]}
            asking = asyncio.create_task(client.chat.completions.create(**ask, stream=stream))
            async with asyncio.timeout(20):
                while not served.generator.requests:
                    await asyncio.sleep(0.001)
                asking.cancel()
                while not served.generator.cancelled:
                    await asyncio.sleep(0.001)
            served.generator.hold.set()
            reply = await client.chat.completions.create(**ask)
            assert reply.choices[0].message.content == "four"
            [sample] = served.samples
            assert sample.response_tokens == served.generator.sampled[-1].tokens

    asyncio.run(main())


def test_an_abort_of_the_engine_is_not_seen_by_the_agent(serve: Any) -> None:
    async def main() -> None:
        async with serve([("the an", "abort"), ("", "abort"), "swer"]) as served, served.openai() as client:
            reply = await client.chat.completions.create(model="policy", messages=[ASK], max_tokens=20)
            assert reply.choices[0].message.content == "the answer"
            [sample] = served.samples
            assert len(sample.response_tokens) == len("the answer") + 1
            assert [request.params.max_new_tokens for request in served.generator.requests] == [20, 14, 14]
            assert served.generator.requests[1].tokens == sample.prompt_tokens + sample.response_tokens[:6]

    asyncio.run(main())


def test_a_run_with_stop_strings_keeps_them(serve: Any) -> None:
    async def main() -> None:
        params = SamplingParams(max_new_tokens=50, stop=("</answer>",))
        async with serve(["<answer>4</answer>"], params=params) as served, served.openai() as client:
            reply = await client.chat.completions.create(model="policy", messages=[ASK])
            assert reply.choices[0].message.content == "<answer>4</answer>"

    asyncio.run(main())
