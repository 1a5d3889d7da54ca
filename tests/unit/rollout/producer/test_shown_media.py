"""Images in rollouts: those of the prompt, and those that a tool shows in a later turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from anygauge.config.schema import Data
from anygauge.rollout.journal import Journal
from anygauge.rollout.multi_turn import multi_turn
from anygauge.rollout.producer import Producer
from anygauge.rollout.text import Rendered, TextTools
from anygauge_hooks.errors import MediaError, RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Prompt, Sample
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.scripted_engine import ListSource, ScriptedEngine

MakeProducer = Callable[..., Producer]
PAD = 3
"""The letter d."""


def image(key: str, start: int, count: int = 2) -> Media:
    return Media("image", key, ((start, count),), (1, 2, 2 * count))


def show(
    messages: Sequence[Mapping[str, Any]], prompt: Prompt, render: Rendered
) -> tuple[tuple[int, ...], tuple[Media, ...]]:
    """Stand for the loader: an image is the letter d, and has two tokens."""
    texts, keys = [], []
    for message in messages:
        for part in message["content"]:
            texts.append(part["text"] if part["type"] == "text" else "d")
            keys += [part["image"]] if part["type"] == "image" else []
    tokens = [
        each for token in render([{"content": "".join(texts)}]) for each in [token] * (1 + (token == PAD))
    ]
    places = [place for place, token in enumerate(tokens) if token == PAD][::2]
    return tuple(tokens), tuple(image(key, place) for key, place in zip(keys, places, strict=True))


@pytest.fixture
def vision_text(text: TextTools) -> TextTools:
    return TextTools(text.tokenizer, Data.model_validate({"train": ["data.jsonl"]}), show=show)


@pytest.fixture
def rows(text: TextTools) -> list[Prompt]:
    return [Prompt(index=0, tokens=(0, PAD, PAD, 1), text="a", media=(image("first", 1),))]


def crop(asked: str) -> dict[str, Any]:
    return {"text": f"see {asked}", "images": [f"crop of {asked}", "second"]}


def odd(asked: str) -> dict[str, Any]:
    return {"picture": asked}


def one(
    make: MakeProducer, engine: ScriptedEngine, tools: TextTools, rows: list[Prompt], **keys: Any
) -> Sample:
    async def step() -> Sample:
        given = {"samples_per_prompt": 1, "prompts_per_step": 1, "max_new_tokens": 60, **keys}
        producer = make(engine, tools=tools, source=ListSource(rows), **given)
        try:
            [group] = await producer.take(1, timeout_s=20)
            [sample] = group.samples
            return sample
        finally:
            await producer.close()

    return asyncio.run(step())


def calls(path: str) -> Callable[..., Any]:
    async def turns(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        return await multi_turn(rollout, prompt, seed, tool=f"{__name__}:{path}")

    return turns


def talker(text: TextTools, *turns: str) -> ScriptedEngine:
    def say(request: GenerateRequest) -> tuple[int, ...]:
        return text.encode(turns[text.decode(request.tokens).count("<result>")])

    return ScriptedEngine(say)


def test_a_prompts_media_go_with_every_request_and_the_sample(
    make_producer: MakeProducer, text: TextTools, vision_text: TextTools, rows: list[Prompt]
) -> None:
    engine = talker(text, "ok")
    sample = one(make_producer, engine, vision_text, rows)
    assert engine.requests[0].media == sample.media == rows[0].media


def test_a_tool_shows_images_in_the_next_turn(
    make_producer: MakeProducer, text: TextTools, vision_text: TextTools, rows: list[Prompt]
) -> None:
    engine = talker(text, "<call>x</call>", "so 5")
    sample = one(make_producer, engine, vision_text, rows, function=calls("crop"))
    whole = "<call>x</call><result>see xdddd</result>so 5"
    assert text.decode(sample.response_tokens) == whole
    first = 4 + whole.index("dddd")
    assert sample.media == (image("first", 1), image("crop of x", first), image("second", first + 2))
    assert [request.media for request in engine.requests] == [rows[0].media, sample.media]
    for medium in sample.media[1:]:
        [(start, count)] = medium.spans
        assert set(sample.loss_mask[start - 4 : start - 4 + count]) == {0}
    budgets = [request.params.max_new_tokens + len(request.tokens) for request in engine.requests]
    assert budgets == [64, 64], "image tokens count for the budget"


def test_where_an_image_finds_no_room_the_rollout_ends(
    make_producer: MakeProducer, text: TextTools, vision_text: TextTools, rows: list[Prompt]
) -> None:
    engine = talker(text, "<call>x</call>", "so 5")
    sample = one(make_producer, engine, vision_text, rows, function=calls("crop"), max_new_tokens=30)
    assert text.decode(sample.response_tokens) == "<call>x</call>"
    assert sample.media == rows[0].media


def test_a_conversation_that_shows_too_much_is_refused(
    make_producer: MakeProducer, text: TextTools, vision_text: TextTools, rows: list[Prompt]
) -> None:
    async def shows(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        draft = rollout.draft()
        assert rollout.max_media == 2
        assert draft.observe((PAD, PAD), [image("k", 0)])
        with pytest.raises(MediaError, match=r"has 3 media; media\.max_per_sample allows 2"):
            draft.observe((PAD, PAD), [image("l", 0)])
        with pytest.raises(MediaError, match=r"has 4 media; media\.max_per_sample allows 2"):
            await rollout.generate(draft.tokens, media=draft.media * 2)
        await draft.generate()
        found: Sample = draft.sample()
        return found

    vision_text.max_media = 2
    sample = one(make_producer, talker(text, "ok"), vision_text, rows, function=shows)
    assert [medium.key for medium in sample.media] == ["first", "k"]


@pytest.mark.parametrize(
    ("tool", "tools", "why"),
    [("odd", "vision_text", "A tool returned 'picture'"), ("crop", "text", "this run's model takes none")],
)
def test_what_cannot_be_shown_fails_the_rollout(
    make_producer: MakeProducer,
    text: TextTools,
    rows: list[Prompt],
    request: pytest.FixtureRequest,
    tool: str,
    tools: str,
    why: str,
) -> None:
    engine = talker(text, "<call>x</call>", "so 5")
    used: TextTools = request.getfixturevalue(tools)
    sample = one(make_producer, engine, used, rows, function=calls(tool), max_failed_ratio=1.0)
    assert sample.error is not None
    assert why in sample.error


def test_a_placeholder_in_a_tools_words_is_refused(
    make_producer: MakeProducer, text: TextTools, vision_text: TextTools, rows: list[Prompt]
) -> None:
    async def told(rollout: Any, prompt: Prompt, seed: int) -> Sample:
        draft = rollout.draft()
        await draft.generate()
        draft.observe((1, PAD, PAD, 2), [image("k", 1)])
        with pytest.raises(
            RolloutError, match="Token 3 added to a sample, at 4, is a placeholder of a medium"
        ):
            draft.observe((1, PAD, PAD, 2, PAD), [image("k", 1)])
        found: Sample = draft.sample()
        return found

    sample = one(make_producer, talker(text, "ok"), vision_text, rows, function=told, forbidden=(PAD,))
    assert sample.media[-1].spans == ((7, 2),)


def test_a_sample_whose_media_lie_outside_is_refused(
    make_producer: MakeProducer, text: TextTools, vision_text: TextTools, rows: list[Prompt]
) -> None:
    def longer(sample: Sample, prompt: Prompt) -> Sample:
        return sample._replace(media=(image("first", 5),))

    sample = one(
        make_producer, talker(text, "ok"), vision_text, rows, after_sample=[longer], max_failed_ratio=1.0
    )
    assert sample.error is not None
    assert "media end at token 7 of 6" in sample.error


def test_the_journal_tells_images_apart_and_survives_being_written() -> None:
    journal = Journal()
    journal.claim((1, 3), (), ("a",)).said = Generation((5,), (-0.5,), (1,), "abort")
    again = Journal.restored(journal.state())
    assert again.claim((1, 3), (), ("b",)).said.tokens == ()
    assert again.claim((1, 3), (), ("a",)).said.tokens == (5,)
    [old] = Journal.restored(
        [{key: value for key, value in journal.state()[0].items() if key != "shown"}]
    ).records
    assert old.shown == ()
