"""Images that agents send: their places in the prompt, what goes on from them, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import openai
import pytest

from anygauge.config.schema import RolloutGateway
from anygauge.rollout.gateway import images
from anygauge.rollout.gateway.server import Gateway
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.testing.tiny_vision import CHAT_TEMPLATE, add_vision_tokens
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_tests.scripted import ScriptedGenerator

pytestmark = pytest.mark.usefixtures("anthropic")
ONE, TWO = "data:image/png;base64,MQ==", "data:image/png;base64,MjI="
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = add_vision_tokens(tiny_tokenizer(tmp_path_factory.mktemp("t"), texts=["what is there "] * 4))
    made.chat_template = CHAT_TEMPLATE
    return made


class Talk:
    """A gateway with one session, whose images have a token for each 4 bytes of their address."""

    def __init__(self, tokenizer: Any, script: Any) -> None:
        self.tokenizer = tokenizer
        self.pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.generator = ScriptedGenerator(tokenizer, script)
        params = SamplingParams(max_new_tokens=500, forbidden=(self.pad,))
        self.gateway = Gateway(tokenizer, params, RolloutGateway())
        self.looked: list[str] = []

    def size(self, image: str) -> int:
        return 2 if image == ONE else 3

    async def look(self, messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        [part] = messages[0]["content"]
        self.looked.append(part["image"])
        if part["image"].startswith("http"):
            raise MediaError("addresses are not fetched")
        start, pad, end = self.tokenizer.encode(MARK)
        count = self.size(part["image"])
        return (start, *[pad] * count, end), (
            Media("image", part["image"], ((1, count),), (1, 2, 2 * count)),
        )

    async def run(self, talk: Any, *, sees: bool = True) -> list[Sample]:
        async with self.gateway as gateway:
            look = self.look if sees else None
            self.session = gateway.open(self.generator, seed=1, look=look, max_media=3)
            await talk(gateway, self.session)
            return self.session.trajectories(Prompt(index=0, tokens=(1,), text=""))

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))


def openai_client(gateway: Gateway, session: Any) -> Any:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    url, key = gateway.openai_url(session), gateway.key(session)
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)


def anthropic_client(gateway: Gateway, session: Any) -> Any:
    from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

    http = DefaultAsyncHttpxClient(verify=False)
    url, key = gateway.anthropic_url(session), gateway.key(session)
    return AsyncAnthropic(base_url=url, api_key=key, max_retries=0, http_client=http)


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_of_two_turns_are_in_one_sample_each_in_its_place(tokenizer: Any) -> None:
    talk = Talk(tokenizer, ["first", "second"])

    async def converse(gateway: Gateway, session: Any) -> None:
        async with openai_client(gateway, session) as client:
            messages: list[Any] = [
                {"role": "user", "content": [{"type": "text", "text": "see "}, shown(ONE)]},
            ]
            said = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": said.choices[0].message.content})
            messages.append({"role": "tool", "tool_call_id": "1", "content": [shown(TWO), shown(ONE)]})
            await client.chat.completions.create(model="policy", messages=messages)

    [sample] = asyncio.run(talk.run(converse))
    assert talk.looked == [ONE, TWO]
    whole = sample.prompt_tokens + sample.response_tokens
    places = [place for place, token in enumerate(whole) if token == talk.pad]
    assert [medium.key for medium in sample.media] == [ONE, TWO, ONE]
    assert [
        place
        for medium in sample.media
        for start, count in medium.spans
        for place in range(start, start + count)
    ] == places
    assert [request.media for request in talk.generator.requests] == [sample.media[:1], sample.media]
    pads = "<|image_pad|>"
    assert talk.text(sample.prompt_tokens).startswith(
        f"<|im_start|>user\nsee <|vision_start|>{pads * 2}<|vision_end|>"
    )
    masked = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if mask]
    assert talk.pad not in masked


def asked(url: str) -> list[Any]:
    data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return [{"role": "user", "content": [{"type": "image", "source": data}]}]


def test_another_image_is_another_conversation(tokenizer: Any) -> None:
    talk = Talk(tokenizer, ["same", "a", "b"])

    async def converse(gateway: Gateway, session: Any) -> None:
        async with anthropic_client(gateway, session) as client:
            said = await client.messages.create(model="policy", max_tokens=9, messages=asked(ONE))
            for url in (ONE, TWO):
                go_on = [
                    {"role": "assistant", "content": said.content[0].text},
                    {"role": "user", "content": "more"},
                ]
                await client.messages.create(model="policy", max_tokens=9, messages=[*asked(url), *go_on])
            count = await client.messages.count_tokens(model="policy", messages=asked(TWO))
            assert count.input_tokens == len(talk.generator.requests[0].tokens) + 1

    first, second = asyncio.run(talk.run(converse))
    assert [medium.key for medium in first.media] == [ONE]
    assert [medium.key for medium in second.media] == [TWO]
    assert first.metadata["turns"] == 2, "it goes on from what was sampled"
    assert second.metadata["turns"] == 1, "nothing was sampled after that image"


@pytest.mark.parametrize(
    ("content", "sees", "why"),
    [
        ([shown("/etc/passwd")], True, "has no image as data: or as an address"),
        ([shown("file:///etc/passwd")], True, "has no image as data: or as an address"),
        ([shown("https://example.org/a.png")], True, "addresses are not fetched"),
        ([shown(ONE)], False, "Only text can be given to this model"),
        (f"a {MARK}", True, "marks another number of images than the 0"),
        ([shown(ONE)] * 4, True, "has 4 media; media.max_per_sample allows 3"),
        ([{"type": "text", "text": MARK}, shown(ONE)], True, "marks another number of images than the 1"),
    ],
)
def test_what_cannot_be_shown_is_refused(tokenizer: Any, content: Any, sees: bool, why: str) -> None:
    talk = Talk(tokenizer, ["never"])

    async def converse(gateway: Gateway, session: Any) -> None:
        asked = [{"role": "user", "content": content}]
        async with openai_client(gateway, session) as client:
            with pytest.raises(openai.BadRequestError, match=why):
                await client.chat.completions.create(model="policy", messages=asked)

    assert asyncio.run(talk.run(converse, sees=sees)) == []


def test_images_of_a_session_are_bounded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, anthropic: Any
) -> None:
    """Also those of requests that only count tokens, which cost nothing of the budget."""
    monkeypatch.setattr(images, "MOST_IMAGES", 1)

    async def talk(gateway: Gateway, session: Any) -> None:
        async with anthropic_client(gateway, session) as client:
            count = partial(client.messages.count_tokens, model="policy")
            await count(messages=asked(ONE))
            await count(messages=asked(ONE))
            with pytest.raises(anthropic.RateLimitError, match="takes no more"):
                await count(messages=asked(TWO))

    served = Talk(tokenizer, [])
    asyncio.run(served.run(talk))
    assert served.looked == [ONE]
