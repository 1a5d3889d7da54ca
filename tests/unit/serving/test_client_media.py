"""Media that go to a server: images as PNG with one placeholder each, video and sound as contents."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from anygauge.config.schema import RolloutClient
from anygauge.serving.image_encoder import ImageEncoder
from anygauge.serving.sglang.client import EngineClient
from anygauge.serving.sglang.client.media import collapsed, media_fields, read_content
from anygauge.serving.sglang.client.wire import request_body
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Content, Media
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.fake_engine import FakeServer, Options, expected
from anygauge_tests.fake_engine.images import stand_ins
from anygauge_tests.media import DictStore

PAD, VOCAB = 90, 512


def image(key: str, start: int, rows: int, columns: int) -> Media:
    return Media("image", key, ((start, rows * columns),), (1, 2 * rows, 2 * columns), source="row 3")


def request(tokens: tuple[int, ...], *media: Media, **params: Any) -> GenerateRequest:
    chosen = SamplingParams(max_new_tokens=6, ignore_eos=True, **params)
    return GenerateRequest("7-0", tokens, chosen, seed=5, media=media)


def expand(tokens: list[int], counts: list[int]) -> tuple[int, ...]:
    rest = iter(counts)
    return tuple(each for token in tokens for each in [token] * (next(rest) if token == PAD else 1))


@given(st.lists(st.tuples(st.lists(st.integers(0, 80), max_size=4), st.integers(1, 5)), max_size=4))
def test_collapsing_undoes_what_expands(parts: list[tuple[list[int], int]]) -> None:
    short, media, at = [7], list[Media](), 1
    for number, (text, count) in enumerate(parts):
        media.append(image(str(number), at + len(text), 1, count))
        short += [*text, PAD]
        at += len(text) + count
    counts = [count for _, count in parts]
    assert collapsed(request(expand(short, counts), *media)) == short


@pytest.mark.parametrize(
    ("tokens", "media", "why"),
    [
        ((1, PAD, PAD, 2, PAD), [image("a", 1, 1, 2)], "2 placeholders for 1 images"),
        ((1, PAD, PAD, 2), [image("a", 2, 1, 2)], "tokens 2 to 4 are not of image alone"),
        ((1, PAD, PAD), [image("a", 2, 1, 2)], "not in order"),
        ((PAD, 1, PAD), [image("a", 2, 1, 1), image("b", 0, 1, 1)], "not in order"),
        ((1, PAD, 2, PAD), [Media("video", "a", ((3, 1), (1, 1)), (2, 1, 1))], "of video are not in order"),
        ((1, PAD, 2), [Media("audio", "a", ((1, 2),), (4, 1, 1))], "tokens 1 to 3 are not of audio alone"),
    ],
)
def test_what_does_not_go_together_is_refused(tokens: Any, media: list[Media], why: str) -> None:
    with pytest.raises(RolloutError, match=why) as caught:
        media_fields(request(tokens, *media), [b'""' for _ in media])
    assert caught.value.code == "AG401"


def test_a_request_without_media_says_nothing_of_them_and_forbidden_tokens_are_biased() -> None:
    body = orjson.loads(request_body(request((1, 2)), "r"))
    assert "image_data" not in body
    assert "logit_bias" not in body["sampling_params"]
    body = orjson.loads(request_body(request((1, 2), forbidden=(PAD, 91)), "r"))
    assert body["sampling_params"]["logit_bias"] == {"90": -1e9, "91": -1e9}


# -------------------------------------------------------------------------
# A server
# -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer(Options(token_s=0.0001, vocab_size=VOCAB, image_token=PAD, image_factor=8)) as found:
        yield found


@pytest.fixture
def store() -> DictStore:
    rng = np.random.default_rng(0)
    pixels = {"a": (16, 24), "b": (8, 16), "odd": (16, 16), "clip": (2, 16, 8)}
    contents = {
        key: Content("image", rng.integers(0, 255, (*size, 3), np.uint8)) for key, size in pixels.items()
    }
    return DictStore({**contents, "sound": Content("audio", rng.standard_normal((9, 4), np.float32))})


def ask(server: FakeServer, store: DictStore, asked: GenerateRequest) -> Generation:
    async def run() -> Generation:
        client = EngineClient(server.address, RolloutClient(pause_s=0.01), image_encoder=ImageEncoder(store))
        try:
            return await client.generate(asked)
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def png(store: DictStore, key: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(store.get(key).data).save(file, "PNG", compress_level=1)
    return file.getvalue()


def test_the_server_sees_the_images_in_order(server: FakeServer, store: DictStore) -> None:
    media = image("a", 1, 2, 3), image("b", 9, 1, 2)
    asked = request((7, *(PAD,) * 6, 8, 9, *(PAD,) * 2, 3), *media)
    a, b = stand_ins(png(store, "a"), 6, VOCAB), stand_ins(png(store, "b"), 2, VOCAB)
    said = ask(server, store, asked)
    tokens, _ = expected((7, *a, 8, 9, *b, 3), 5, "default", 0, 6, VOCAB)
    assert said.tokens == tokens
    other, _ = expected((7, *b, *a[2:], 8, 9, *b, 3), 5, "default", 0, 6, VOCAB)
    assert tokens != other


def npy(store: DictStore, key: str) -> bytes:
    file = io.BytesIO()
    np.save(file, store.get(key).data)
    return file.getvalue()


def test_the_server_gets_video_and_sound_as_the_trainer_has_them(
    server: FakeServer, store: DictStore
) -> None:
    """All tokens are sent as they are, and each content with its places, an image among them too."""
    video = Media("video", "clip", ((1, 2), (4, 2)), (2, 2, 1), 0.5, "row 4")
    sound = Media("audio", "sound", ((8, 3),), (9, 1, 1))
    asked = request(
        (7, *(PAD,) * 2, 8, *(PAD,) * 2, 9, 5, *(91,) * 3, *(92,) * 2), video, sound, image("b", 11, 1, 2)
    )
    shown = list(asked.tokens)
    for medium in asked.media:
        for start, count in medium.spans:
            shown[start : start + count] = stand_ins(npy(store, medium.key), count, VOCAB)
    assert ask(server, store, asked).tokens == expected(tuple(shown), 5, "default", 0, 6, VOCAB)[0]
    sent = orjson.loads(orjson.dumps(media_fields(asked, [b'"Vg=="', b'"Uw=="', b'"SQ=="'])))
    assert [read_content(sent[f"{kind}_data"][0]) for kind in ("video", "audio", "image")] == list(
        zip(asked.media, (b"V", b"S", b"I"), strict=True)
    )


def test_a_server_that_counts_otherwise_is_found_out(server: FakeServer, store: DictStore) -> None:
    with pytest.raises(RolloutError, match="has read 5 tokens in request 7-0, which has 7 with 1 media"):
        ask(server, store, request((7, *(PAD,) * 6), image("odd", 1, 2, 3)))


def test_an_image_that_is_gone_is_named_and_the_next_request_is_served(
    server: FakeServer, store: DictStore
) -> None:
    async def run() -> None:
        pictures = ImageEncoder(store)
        with pytest.raises(RolloutError, match=r"Image late \(row 3\) is not in the run's store"):
            await pictures.encoded([image("late", 0, 1, 1)])
        store.put("late", store.get("a"))
        [text] = await pictures.encoded([image("late", 0, 1, 1)])
        assert base64.b64decode(orjson.loads(text)) == png(store, "a")

    asyncio.run(run())


def test_a_png_is_made_once_and_the_oldest_go_first(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    encode = ImageEncoder._encode
    monkeypatch.setattr(
        ImageEncoder, "_encode", lambda self, each, _: made.append(each.key) or encode(self, each, _)
    )

    async def run() -> None:
        media = {key: image(key, 0, 1, 1) for key in ("a", "b", "odd")}
        pictures = ImageEncoder(store)
        together = await asyncio.gather(*(pictures.encoded([media["a"], media["b"]]) for _ in range(8)))
        assert sorted(made) == ["a", "b"]
        assert all(each == together[0] for each in together)
        small = ImageEncoder(store, max_bytes=len(together[0][0]) + len(together[0][1]))
        await small.encoded([media["a"], media["b"]])
        await small.encoded([media["b"]])
        await small.encoded([media["odd"]])  # without room for all: a goes
        made.clear()
        await small.encoded([media["b"], media["odd"]])
        assert made == []
        await small.encoded([media["a"]])
        assert made == ["a"]

    asyncio.run(run())


def test_without_a_store_media_are_refused(server: FakeServer) -> None:
    async def run() -> None:
        client = EngineClient(server.address, RolloutClient())
        try:
            with pytest.raises(RolloutError, match="no store of them"):
                await client.generate(request((PAD,), image("a", 0, 1, 1)))
        finally:
            await client.close()

    asyncio.run(run())
