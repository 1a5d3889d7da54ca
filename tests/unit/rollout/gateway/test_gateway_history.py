"""Continuation of earlier requests: exact tokens, forks, retries; and the samples trained on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anygauge.config.schema import RolloutGateway
from anygauge.rollout.gateway.messages import Chat, Message
from anygauge.rollout.gateway.request_parsing import ChatRequest
from anygauge.rollout.gateway.server import Gateway
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_tests.scripted import ScriptedGenerator

PROMPT = Prompt(index=7, tokens=(1,), text="")


def user(text: str) -> Message:
    return Message("user", text)


def tool(text: str) -> Message:
    return Message("tool", text)


class Talk:
    """A session without HTTP."""

    def __init__(self, tokenizer: Any, script: Any, **options: Any) -> None:
        self.generator = ScriptedGenerator(tokenizer, script)
        self.tokenizer = tokenizer
        self.gateway = Gateway(tokenizer, SamplingParams(max_new_tokens=500), RolloutGateway(**options))
        self.session = self.gateway.open(self.generator, seed=1)
        self._asks = 0

    async def say(self, *messages: Message, retried: bool = False, **fields: Any) -> Message:
        self._asks += not retried
        ask = ChatRequest("policy", Chat(tuple(messages)), **fields)
        sampling = await self.session.submit(ask, ask.chat.characters(), str(self._asks), retried=retried)
        async with sampling:
            answers = await sampling.answers()
        return answers[0].message()

    @property
    def samples(self) -> list[Sample]:
        return self.session.trajectories(PROMPT)

    def check(self) -> None:
        """Check that each token that was sampled is trained on once, where it stood, and no other is."""
        trained: Counter[float] = Counter()
        sampled = {
            value: (token, request.tokens + said.tokens[:place])
            for request, said in zip(self.generator.requests, self.generator.sampled, strict=True)
            for place, (token, value) in enumerate(zip(said.tokens, said.log_probs, strict=True))
        }
        for sample in self.samples:
            assert len(sample.response_tokens) == len(sample.log_probs) == len(sample.loss_mask)
            assert len(sample.response_tokens) == len(sample.weight_versions)
            whole = sample.prompt_tokens + sample.response_tokens
            for place, (mask, value, version) in enumerate(
                zip(sample.loss_mask, sample.log_probs, sample.weight_versions, strict=True)
            ):
                at = len(sample.prompt_tokens) + place
                if mask:
                    trained[value] += 1
                    assert sampled[value] == (whole[at], whole[:at])
                    assert version == 0
                else:
                    assert (value, version) == (0.0, -1)
        assert trained == Counter(dict.fromkeys(sampled, 1))


def test_turns_without_reasoning_are_one_sample(tokenizer: Any) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, ["the answer", "is four", "sunny"])
        first = await talk.say(user("one"))
        second = await talk.say(user("one"), first, user("two"))
        await talk.say(user("one"), first, user("two"), second, user("three"))
        assert len(talk.samples) == 1
        talk.check()
        # Encoded again, the text would be other tokens.
        tokens = talk.samples[0].response_tokens
        assert tokenizer.encode(tokenizer.decode(tokens)) != list(tokens)

    asyncio.run(main())


def test_reasoning_that_the_template_drops_forks(tokenizer: Any) -> None:
    async def main() -> None:
        script = ["<think>\nwhy\n</think>\n\nfour", "<think>\nso\n</think>\n\nfive"]
        talk = Talk(tokenizer, list(script))
        first = await talk.say(user("one"))
        assert (first.content, first.reasoning) == ("four", "why")
        await talk.say(user("one"), first, user("two"))
        assert "why" not in tokenizer.decode(talk.generator.requests[1].tokens)
        assert len(talk.samples) == 2
        talk.check()
        talk = Talk(tokenizer, list(script), history="append")
        first = await talk.say(user("one"))
        await talk.say(user("one"), first, user("two"))
        assert "why" in tokenizer.decode(talk.generator.requests[1].tokens)
        assert len(talk.samples) == 1
        talk.check()

    asyncio.run(main())


def test_reasoning_before_an_answer_of_a_tool_stays(tokenizer: Any) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, ["<think>\nwhy\n</think>\n\nfour", "five"])
        first = await talk.say(user("one"))
        # Agents rarely send it back.
        await talk.say(user("one"), first._replace(reasoning=None), tool("seen"))
        assert len(talk.samples) == 1
        talk.check()

    asyncio.run(main())


@pytest.mark.parametrize(
    "edited",
    [
        [user("other"), Message("assistant", "the answer"), user("two")],
        [Message("system", "new"), user("one"), Message("assistant", "the answer"), user("two")],
        [user("one"), Message("assistant", "the edit"), user("two")],
        [user("one"), Message("assistant", "the answer", reasoning="edited"), user("two")],
        [user("two")],
    ],
)
def test_an_edit_forks(tokenizer: Any, edited: list[Message]) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, ["the answer", "is four", "sunny"])
        first = await talk.say(user("one"))
        await talk.say(user("one"), first, user("two"))
        await talk.say(*edited)
        # What was edited is the template's text, token for token.
        assert talk.generator.requests[2].tokens == tuple(
            tokenizer.apply_chat_template(
                [message.for_template() for message in edited],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        assert len(talk.samples) == 2
        talk.check()

    asyncio.run(main())


def test_a_turn_after_reasoning_that_was_edited_is_not_the_turn_after_the_original(tokenizer: Any) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, ["<think>\nwhy\n</think>\n\nfour", "five", "six"])
        first = await talk.say(user("one"))
        second = await talk.say(user("one"), first, tool("seen"))
        edited = first._replace(reasoning="because")
        await talk.say(user("one"), edited, tool("seen"), second, tool("seen again"))
        prompt = tokenizer.decode(talk.generator.requests[2].tokens)
        assert "because" in prompt
        assert "why" not in prompt
        assert len(talk.samples) == 2
        talk.check()

    asyncio.run(main())


def test_an_edit_of_a_late_message_keeps_the_exact_beginning(tokenizer: Any) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, ["the answer", "is four", "sunny", "in Paris"])
        first = await talk.say(user("one"))
        second = await talk.say(user("one"), first, user("two"))
        await talk.say(user("one"), first, user("two"), second._replace(content="edited"), user("x"))
        await talk.say(user("one"), first, user("other"))
        beginning = talk.generator.requests[0].tokens + talk.generator.sampled[0].tokens
        for request in talk.generator.requests[1:]:
            assert request.tokens[: len(beginning)] == beginning
        samples = talk.samples
        assert [sum(sample.loss_mask) for sample in samples] == [
            len(talk.generator.sampled[0].tokens) + len(talk.generator.sampled[1].tokens),
            len(talk.generator.sampled[2].tokens),
            len(talk.generator.sampled[3].tokens),
        ]
        talk.check()

    asyncio.run(main())


def test_a_turn_that_was_cut_is_closed_by_the_template(tokenizer: Any) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, ["the answer is", "four"])
        first = await talk.say(user("one"), max_tokens=6)
        await talk.say(user("one"), first, user("two"))
        one, two = talk.generator.requests
        between = two.tokens[len(one.tokens) + 6 :]
        assert tokenizer.decode(between).startswith("<|im_end|>\n<|im_start|>user\ntwo<|im_end|>")
        assert len(talk.samples) == 1
        talk.check()

    asyncio.run(main())


def test_a_turn_that_ended_with_another_token_forks(tokenizer: Any) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, [("four<|endoftext|>", "stop"), "five"])
        talk.generator._characters = tokenizer.encode  # type: ignore[method-assign]
        first = await talk.say(user("one"))
        assert first.content == "four"
        await talk.say(user("one"), first, user("two"))
        assert tokenizer.convert_tokens_to_ids("<|endoftext|>") not in talk.generator.requests[1].tokens
        assert len(talk.samples) == 2
        talk.check()

    asyncio.run(main())


def test_two_answers_that_say_the_same_are_both_trained_on(tokenizer: Any) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, ["four", "four", "five"])
        first = await talk.say(user("one"))
        await talk.say(user("one"))
        await talk.say(user("one"), first, user("two"))
        assert len(talk.samples) == 2
        talk.check()

    asyncio.run(main())


def test_a_retry_is_the_same_request(serve: Any) -> None:
    async def main() -> None:
        async with serve(["four", "five", "six"]) as served, served.openai() as client:
            ask = {"model": "policy", "messages": [{"role": "user", "content": "one"}]}
            said = [
                (await client.chat.completions.create(**ask, extra_headers={"x-stainless-retry-count": n}))
                .choices[0]
                .message.content
                for n in ("0", "1", "2")
            ]
            assert said == ["four", "four", "four"]
            stream = {**ask, "stream": True}
            for number in ("0", "1"):
                chunks = await client.chat.completions.create(
                    **stream, extra_headers={"x-stainless-retry-count": number}
                )
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
                assert text == "five"
            assert len(served.samples) == 2
            # Without the header it is a second answer that is wanted.
            assert (await client.chat.completions.create(**ask)).choices[0].message.content == "six"
            assert len(served.samples) == 3

    asyncio.run(main())


def test_a_retry_joins_the_request_that_is_under_way(serve: Any) -> None:
    async def main() -> None:
        async with serve(["four"]) as served, served.openai(max_retries=0) as client:
            served.generator.hold.clear()
            ask = {"model": "policy", "messages": [{"role": "user", "content": "one"}]}
            first = asyncio.create_task(client.chat.completions.create(**ask))
            await served.generator.began.wait()
            second = asyncio.create_task(
                client.chat.completions.create(**ask, extra_headers={"x-stainless-retry-count": "1"})
            )
            async with asyncio.timeout(10):
                while served.session._samplings and not any(
                    each._waiting == 2 for known in served.session._samplings.values() for each in known
                ):
                    await asyncio.sleep(0.001)
            served.generator.hold.set()
            said = [each.choices[0].message.content for each in await asyncio.gather(first, second)]
            assert said == ["four", "four"]
            assert len(served.samples) == 1

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_closing_ends_what_is_under_way(serve: Any, stream: bool) -> None:
    async def main() -> None:
        async with serve(["four"]) as served, served.openai(max_retries=0) as client:
            served.generator.hold.clear()
            ask = {"model": "policy", "messages": [{"role": "user", "content": "one"}], "stream": stream}
            task = asyncio.create_task(client.chat.completions.create(**ask))
            await served.generator.began.wait()
            await served.gateway.end(served.session)
            with pytest.raises(openai.InternalServerError, match="closed"):
                await task
            assert served.generator.cancelled
            assert served.samples == []

    asyncio.run(main())


WORDS = ["the answer", "is four", "sunny", " Paris ", "<think>\nwhy\n</think>\n\nfour", "é 🙂"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["go on", "tool", "edit", "drop", "again", "other", "cut", "forget", "retry", "stop"]
        ),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25)
@given(steps=STEPS, words=st.randoms(use_true_random=False), history=st.sampled_from(["template", "append"]))
def test_each_token_is_trained_on_once_whatever_an_agent_does(
    tokenizer: Any, steps: list[tuple[str, int]], words: Any, history: str
) -> None:
    async def main() -> None:
        talk = Talk(tokenizer, lambda request: words.choice(WORDS), history=history)
        chats = [[user("one")]]
        for what, which in steps:
            chat = list(chats[which % len(chats)])
            fields: dict[str, Any] = {}
            if what == "tool" and chat[-1].role == "assistant":
                chat.append(tool(f"seen {which}"))
            elif what == "edit":
                place = which % len(chat)
                chat[place] = chat[place]._replace(content=chat[place].content + "!")
            elif what == "drop":
                del chat[1 : 1 + which % 3]
            elif what == "other":
                chat.insert(0, Message("system", f"be {which % 2}"))
            elif what == "cut":
                fields["max_tokens"] = 1 + which % 5
            elif what == "stop":
                fields["stop"] = ("answer", "four")
            elif what == "forget":
                chat = [message._replace(reasoning=None) for message in chat]
            if chat[-1].role == "assistant" and what != "again":
                chat.append(user(f"and {which % 3}"))
            said = await talk.say(*chat, **fields)
            if what == "retry":
                assert await talk.say(*chat, **fields, retried=True) == said
            chats.append([*chat, said])
        talk.check()

    asyncio.run(main())
