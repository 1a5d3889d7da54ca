"""Rows with images: whatever way they are given, counted before they are decoded, held once, and let go."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anygauge.config.schema import Data, DataFile
from anygauge.config.schema import Media as Settings
from anygauge.data.media.contents import header_of
from anygauge.data.media.decode import as_pixels, decode_image
from anygauge.data.media.finder import MediaFinder
from anygauge.data.media.loader import LoadedSource, MediaLoader, windows
from anygauge.data.media.sources import source_of
from anygauge.data.media.store import FileStore, MappedFiles
from anygauge.data.source import FileSource
from anygauge_hooks.errors import DataError, MediaError, OutOfMemoryError
from anygauge_hooks.rl import Prompt
from anygauge_tests.scripted_engine import ListSource

WriteRows = Callable[..., Path]
STOPS = ["</assistant>"]


def picture(width: int = 24, height: int = 16, color: Any = (200, 30, 30), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), color)


def png(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, options.pop("format", "PNG"), **options)
    return buffer.getvalue()


def claiming(width: int, height: int) -> bytes:
    """Return the header of a PNG file of that size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    checked = header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + checked + struct.pack(">I", 8) + b"IDAT"


class Bench:
    """Sources, and the loader behind them."""

    def __init__(self, tokenizer: Any, processor: Any, folder: Path, stack: ExitStack) -> None:
        self.tokenizer, self.processor, self.folder, self.stack = tokenizer, processor, folder, stack

    def open(self, path: Path, settings: dict[str, Any] | None = None, **data: Any) -> LoadedSource:
        stops = data.pop("stops", None)
        media = Settings(**(settings or {}))
        defaults = {
            "train": (DataFile(path=str(path)),),
            "label_key": None,
            "shuffle": False,
            "multimodal_keys": {"image": "images"},
            "cache": self.folder / "cache",
        }
        config = Data(**(defaults | data))
        self.reader = MediaFinder(media, config.multimodal_keys, self.processor, self.tokenizer, ["image"])
        self.source = FileSource(config, self.tokenizer, stop_tokens=stops, media=self.reader)
        self.store = FileStore(self.folder / "media")
        self.loader = MediaLoader(self.store, self.reader)
        self.stack.callback(self.loader.close)
        return LoadedSource(self.source, self.loader)

    def one(self, path: Path, settings: dict[str, Any] | None = None, **data: Any) -> Prompt:
        (prompt,) = self.open(path, settings, **data).next(1)
        return prompt


@pytest.fixture
def bench(vision_tokenizer: Any, processor: Any, tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(vision_tokenizer, processor, tmp_path, stack)


def pads(prompt: Prompt, processor: Any) -> list[int]:
    return [place for place, token in enumerate(prompt.tokens) if token == processor.kinds["image"]]


# -------------------------------------------------------------------------
# Problems of geometry
# -------------------------------------------------------------------------


def test_a_problem_of_geometry_is_counted_exactly_held_once_and_dropped(bench: Bench, geo3k: Path) -> None:
    keys = {"input_key": "problem", "label_key": "answer"}
    source = bench.open(geo3k / "train.jsonl", **keys, max_prompt_tokens=200, apply_chat_template=True)
    assert bench.store.bytes() == 0
    prompts = source.next(len(source))
    assert len(source) == 10
    for prompt in prompts:
        (medium,) = prompt.media
        ((start, count),) = medium.spans
        assert pads(prompt, bench.processor) == list(range(start, start + count))
        assert count == medium.grid[1] * medium.grid[2] // 4
        content = bench.store.get(medium.key)
        assert content.data.shape == (medium.grid[1] * 4, medium.grid[2] * 4, 3)
        assert prompt.text.startswith("<user><|vision_start|>")
        assert "images" not in prompt.metadata
    assert bench.store.bytes() == sum(each.grid[1] * each.grid[2] * 48 for p in prompts for each in p.media)
    assert MappedFiles(bench.folder / "media").bytes() == bench.store.bytes()
    del prompts, prompt
    assert bench.store.bytes() == 0


def test_images_count_for_the_length_filter(bench: Bench, geo3k: Path) -> None:
    keys = {"input_key": "problem", "label_key": "answer"}
    lengths = sorted(len(prompt.tokens) for prompt in bench.open(geo3k / "train.jsonl", **keys).all())
    bench.open(geo3k / "train.jsonl", **keys, max_prompt_tokens=lengths[3])
    assert (len(bench.source), bench.source.num_dropped) == (4, 6)


# -------------------------------------------------------------------------
# Where an image may be
# -------------------------------------------------------------------------


def givens(folder: Path) -> dict[str, Any]:
    raw = png(picture())
    (folder / "one.png").write_bytes(raw)
    text = base64.b64encode(raw).decode()
    return {
        "path": "one.png",
        "absolute path": str(folder / "one.png"),
        "base64": text,
        "data": f"data:image/png;base64,{text}",
        "object with a path": {"path": "one.png"},
        "object with bytes": {"bytes": text, "path": "any.png"},
    }


@pytest.mark.parametrize(
    "how", ["absolute path", "base64", "data", "object with a path", "object with bytes"]
)
def test_an_image_is_the_same_wherever_it_is(
    how: str, bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    given = givens(tmp_path)
    rows = write_rows(*({"prompt": "<image>?", "images": [given[each]]} for each in ("path", how)))
    first, second = bench.open(rows).next(2)
    assert first.media[0].key == second.media[0].key
    assert len(first.tokens) == 1 + 1 + 6 + 1 + 1
    assert np.array_equal(bench.store.get(first.media[0].key).data, np.asarray(picture()))
    del first
    assert bench.store.bytes() == 24 * 16 * 3
    del second
    assert bench.store.bytes() == 0


def test_bytes_of_parquet_are_read(bench: Bench, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [[{"bytes": png(picture(color=(shade, 0, 0))), "path": None}] for shade in (1, 2)]
    table = pa.table({"prompt": ["<image>a", "<image>b"], "images": images, "blob": [b"x", b"y"]})
    pq.write_table(table, tmp_path / "train.parquet")
    first, second = bench.open(tmp_path / "train.parquet").next(2)
    shades = [int(bench.store.get(each.media[0].key).data[0, 0, 0]) for each in (first, second)]
    assert shades == [1, 2]
    assert first.metadata == {}


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(png(picture()))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/one.png"
    server.shutdown()
    thread.join()
    server.server_close()


def test_addresses_are_behind_a_switch_and_a_limit(bench: Bench, write_rows: WriteRows, address: str) -> None:
    rows = write_rows({"prompt": "<image>?", "images": address})
    here = {"allow_urls": True, "allow_private_urls": True}
    prompt = bench.one(rows, here)
    assert bench.store.has(prompt.media[0].key)
    with pytest.raises(DataError, match=r"train.jsonl:1: image 1 \(http.*media.allow_urls is false"):
        bench.open(rows)
    with pytest.raises(DataError, match=r"MiB; media.max_bytes allows"):
        bench.open(rows, {**here, "max_bytes": 20})
    with pytest.raises(DataError, match=r"image 1 \(http.*\) leads to 127.0.0.1, which is not a public"):
        bench.open(rows, {"allow_urls": True})
    dead = write_rows({"prompt": "<image>?", "images": "http://127.0.0.1:9/one.png"})
    with pytest.raises(DataError, match=r"cannot be fetched within 2 s"):
        bench.open(dead, {**here, "timeout_s": 2.0})


# -------------------------------------------------------------------------
# Placeholders
# -------------------------------------------------------------------------


def test_placeholders_stand_in_strings_and_in_content_parts(bench: Bench, write_rows: WriteRows) -> None:
    value = f"data:;base64,{base64.b64encode(png(picture(40, 8))).decode()}"
    small = f"data:;base64,{base64.b64encode(png(picture(8, 8))).decode()}"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b<image>"}]
    own = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": value},
        {"type": "text", "text": "b<image>"},
    ]
    rows = write_rows(
        {"prompt": "a<image>b<image>", "images": [value, small]},
        {"prompt": [{"role": "user", "content": "a<image>b<image>"}], "images": [value, small]},
        {"prompt": [{"role": "user", "content": parts}], "images": [value, small]},
        {"prompt": [{"role": "user", "content": own}], "images": [small]},
    )
    prompts = bench.open(rows, apply_chat_template=True).next(4)
    assert {prompt.tokens for prompt in prompts} == {prompts[0].tokens}
    assert {prompt.media for prompt in prompts} == {prompts[0].media}
    assert [each.num_tokens for each in prompts[0].media] == [5, 1]


def test_a_template_without_parts_gets_marks_in_text(
    bench: Bench, write_rows: WriteRows, tokenizer: Any
) -> None:
    value = f"data:;base64,{base64.b64encode(png(picture())).decode()}"
    rows = write_rows({"prompt": "a<image>b", "images": [value]})
    with_parts = bench.one(rows, apply_chat_template=True)
    template, bench.tokenizer.chat_template = (
        bench.tokenizer.chat_template,
        ("{% for message in messages %}<user>{{ message['content'] + '' }}</user>{% endfor %}<assistant>"),
    )
    try:
        assert bench.one(rows, apply_chat_template=True).tokens == with_parts.tokens
    finally:
        bench.tokenizer.chat_template = template


def test_a_row_without_media_stays_a_row_of_text(bench: Bench, write_rows: WriteRows) -> None:
    rows = write_rows({"prompt": "a"}, {"prompt": "b<video>", "images": None}, {"prompt": "c", "images": []})
    prompts = bench.open(rows).next(3)
    assert [prompt.media for prompt in prompts] == [(), (), ()]
    assert [len(prompt.tokens) for prompt in prompts] == [2, 9, 2]


# -------------------------------------------------------------------------
# What is wrong
# -------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "fewer": ({"prompt": "<image><image>", "images": ["one.png"]}, "2 placeholders <image> and 1 image"),
    "more": ({"prompt": "a", "images": ["one.png"]}, "0 placeholders <image> and 1 image"),
    "gone": (
        {"prompt": "<image>", "images": ["none.png"]},
        r"image 1 \(none.png\) cannot be found: /.*none.png",
    ),
    "long": (
        {"prompt": "<image>", "images": ["images/train/" + "a" * 60]},
        r"image 1 \(images/train/a+\) cannot be found: /.*/images/train/a+ does not exist",
    ),
    "null": ({"prompt": "<image>", "images": [None, "one.png"]}, "has null as image 1 of field 'images'"),
    "empty": ({"prompt": "<image>", "images": [""]}, r"image 1 \(in the row\) is an empty text"),
    "text": (
        {"prompt": "<image>", "images": ["text.png"]},
        r"image 1 \(text.png\) is not in a supported image format",
    ),
    "folder": ({"prompt": "<image>", "images": ["."]}, r"image 1 \(.\) is a directory"),
    "second": ({"prompt": "<image><image>", "images": ["one.png", 7]}, r"image 2 \(int\) is given as int"),
    "object": ({"prompt": "<image>", "images": [{"file": "one.png"}]}, "is an object with 'file'"),
    "base64": ({"prompt": "<image>", "images": ["data:;base64,???"]}, "is not base64"),
    "address": ({"prompt": "<image>", "images": ["http://a b/1.png"]}, "is an address, and"),
    "large": (
        {"prompt": "<image>", "images": ["large.png"]},
        r"image 1 \(large.png\) is 9000x9000 pixels; media.max_image_pixels allows 50000000",
    ),
    "narrow": (
        {"prompt": "<image>", "images": ["narrow.png"]},
        r"image 1 \(narrow.png\): It is 1000x1 pixels",
    ),
    "many": (
        {"prompt": "<image>" * 17, "images": ["one.png"] * 17},
        "has 17 media; media.max_per_sample allows 16",
    ),
    "pad": ({"prompt": "<|image_pad|>"}, r"holds '<\|image_pad\|>' in its text"),
    "mark": (
        {"prompt": "<image><|vision_start|><|image_pad|><|vision_end|>", "images": ["one.png"]},
        r"holds '<\|vision_start\|><\|image_pad\|><\|vision_end\|>' in its text",
    ),
    "kind": (
        {"prompt": [{"role": "user", "content": [{"type": "video", "video": ["one.png"]}]}]},
        "part of type 'video', which the run does not take",
    ),
    "part": ({"prompt": [{"role": "user", "content": [{"type": "smell"}]}]}, "part of type 'smell'"),
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_bad_row_is_named_or_left_out(
    what: str, bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(png(picture()))
    (tmp_path / "narrow.png").write_bytes(png(picture(1000, 1)))
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "large.png").write_bytes(claiming(9_000, 9_000))
    row, message = BAD[what]
    rows = write_rows({"prompt": "good"}, row)
    chats = {"apply_chat_template": True}
    with pytest.raises(DataError, match=rf"train.jsonl:2: .*{message}"):
        bench.open(rows, **chats)
    source = bench.open(rows, {"on_error": "drop"}, **chats)
    assert (len(source), bench.source.num_unreadable) == (1, 1)


def test_what_only_decoding_shows_stops_the_run_or_leaves_the_row_out(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))
    (tmp_path / "half.png").write_bytes(png(noise)[:2000])
    (tmp_path / "one.png").write_bytes(png(picture()))
    rows = write_rows(
        {"prompt": "<image>a", "images": "half.png"}, {"prompt": "<image>b", "images": "one.png"}
    )
    with pytest.raises(MediaError, match=r"train.jsonl:1: image 1 \(half.png\) cannot be decoded"):
        bench.open(rows).next(2)
    prompts = bench.open(rows, {"on_error": "drop"}).next(2)
    assert [prompt.source[-1] for prompt in prompts] == ["2", "2"]
    assert bench.loader.metrics()["data/media_dropped"] == 2
    (tmp_path / "one.png").write_bytes(png(noise)[:2000])
    with pytest.raises(MediaError, match="No row has media"):
        bench.open(rows, {"on_error": "drop"}).next(1)


def test_rows_that_are_left_out_count_whichever_data_set_has_them(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    """An evaluation set with fields of its own has a reader of its own."""
    for name in ("lost", "half", "one"):
        (tmp_path / f"{name}.png").write_bytes(png(picture()))
    rows = [{"prompt": "<image>", "pictures": f"{name}.png"} for name in ("lost", "half", "one")]
    bench.open(path := write_rows(*rows), {"on_error": "drop"}, multimodal_keys={"image": "pictures"})
    training = MediaFinder(bench.reader.settings, {}, bench.processor, bench.tokenizer, ["image"])
    keys = {"multimodal_keys": {"image": "pictures"}, "cache": tmp_path / "cache"}
    config = Data(train=(DataFile(path=str(path)),), label_key=None, **keys)
    source = FileSource(config, bench.tokenizer, media=training.of({"image": "pictures"}))
    (tmp_path / "lost.png").unlink()
    (tmp_path / "half.png").write_bytes(png(picture())[:60])
    prompts = source.all()
    loader = MediaLoader(bench.store, training)
    assert (len(source), len(prompts)) == (3, 2)
    assert [loader.metrics()["data/media_dropped"] for _ in range(2)] == [1, 0]
    with pytest.raises(MediaError, match=r"train.jsonl:2: image 1 \(half.png\) cannot be decoded"):
        next(windows(loader, prompts, 2))
    loader._pool.shutdown()


BROKEN_ANSWERS = {
    "not HTTP": b"a server of something else\r\n\r\n",
    "too short": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
    "nothing": b"",
    "missing": b"HTTP/1.1 404 Not Found\r\n\r\n",
}


@pytest.mark.parametrize("answer", BROKEN_ANSWERS.values(), ids=BROKEN_ANSWERS)
def test_an_address_that_breaks_is_a_broken_row(
    answer: bytes, bench: Bench, write_rows: WriteRows, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answer, "do_GET", lambda handler: handler.wfile.write(answer))
    rows = write_rows({"prompt": "good"}, {"prompt": "<image>", "images": address})
    here = {"allow_urls": True, "allow_private_urls": True}
    with pytest.raises(DataError, match=r"train.jsonl:2: image 1 \(http://.*/one.png\) cannot be fetched"):
        bench.open(rows, here)
    source = bench.open(rows, {**here, "on_error": "drop"})
    assert (len(source), bench.source.num_unreadable) == (1, 1)


def test_what_a_plugin_raises_over_a_medium_is_not_the_templates(
    bench: Bench, write_rows: WriteRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a mistake of the family's")

    (tmp_path / "one.png").write_bytes(png(picture()))
    monkeypatch.setattr(type(bench.processor), "measure", broken)
    rows = write_rows({"prompt": "<image>", "images": "one.png"})
    with pytest.raises(RuntimeError, match="a mistake of the family's"):
        bench.open(rows, apply_chat_template=True)


def test_a_full_store_is_no_broken_row(
    bench: Bench, write_rows: WriteRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.png").write_bytes(png(picture()))

    def full(path: Path, content: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("anygauge.data.media.store._write", full)
    source = bench.open(write_rows({"prompt": "<image>", "images": "one.png"}), {"on_error": "drop"})
    with pytest.raises(OutOfMemoryError, match="no room for"):
        source.next(1)
    assert bench.loader.metrics()["data/media_dropped"] == 0


def test_a_file_that_goes_during_the_run_is_named(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(png(picture()))
    source = bench.open(write_rows({"prompt": "<image>", "images": "one.png"}))
    (tmp_path / "one.png").unlink()
    with pytest.raises(MediaError, match=r"train.jsonl:1: image 1 \(one.png\) cannot be found"):
        source.next(1)


# -------------------------------------------------------------------------
# SFT, evaluation, resumption
# -------------------------------------------------------------------------


def test_a_conversation_is_trained_on_behind_its_images(bench: Bench, write_rows: WriteRows) -> None:
    value = f"data:;base64,{base64.b64encode(png(picture())).decode()}"
    talk = [
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "and <image>?"},
        {"role": "assistant", "content": "too"},
    ]
    prompt = bench.one(
        write_rows({"prompt": talk, "images": [value, value]}), apply_chat_template=True, stops=STOPS
    )
    tokens = prompt.tokens + prompt.response
    trained = [token for token, mask in zip(prompt.response, prompt.loss_mask, strict=True) if mask]
    assert bench.tokenizer.decode(trained) == "red</assistant>too</assistant>"
    for medium in prompt.media:
        ((start, count),) = medium.spans
        assert set(tokens[start : start + count]) == {bench.processor.kinds["image"]}
    assert prompt.media[0].key == prompt.media[1].key
    assert prompt.media[1].spans[0][0] > len(prompt.tokens)


def test_media_in_a_trained_turn_are_refused(bench: Bench, write_rows: WriteRows) -> None:
    value = f"data:;base64,{base64.b64encode(png(picture())).decode()}"
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<image>"}]
    with pytest.raises(DataError, match="media in a turn of the assistant"):
        bench.open(write_rows({"prompt": talk, "images": [value]}), apply_chat_template=True, stops=STOPS)


def test_evaluation_holds_its_images_for_a_while(bench: Bench, write_rows: WriteRows, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(picture()))
    prompts = bench.open(write_rows({"prompt": "<image>", "images": "one.png"})).all()
    assert bench.store.bytes() == 0
    for _ in range(2):
        with bench.loader.held(prompts):
            assert bench.store.has(prompts[0].media[0].key)
        assert bench.store.bytes() == 0


def test_a_data_set_has_its_images_in_a_field_of_its_own(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(png(picture()))
    bench.open(write_rows({"prompt": "a"}))
    finder = bench.reader.of({"image": "pictures"})
    rows = write_rows({"prompt": "<image>", "pictures": "one.png"})
    own = Data(
        train=(DataFile(path=str(rows)),),
        label_key=None,
        multimodal_keys={"image": "pictures"},
        cache=tmp_path / "cache",
    )
    prompts = FileSource(own, bench.tokenizer, media=finder).all()
    with bench.loader.held(prompts):
        assert bench.store.has(prompts[0].media[0].key)


def test_prompts_of_an_earlier_part_of_a_run_are_decoded_again(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(png(picture()))
    rows = write_rows({"prompt": "<image>", "images": "one.png"})
    before = bench.one(rows)
    resumed = bench.open(rows)
    resumed.adopt([before])
    assert bench.store.has(before.media[0].key)
    (tmp_path / "one.png").write_bytes(png(picture(color=(0, 0, 0))))
    with pytest.raises(MediaError, match=r"train.jsonl:1: image \(one.png\) has changed"):
        bench.open(rows).adopt([before])


def test_a_source_that_cannot_recall_media_is_named(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(png(picture()))
    rows = write_rows({"prompt": "<image>", "images": "one.png"})
    before = bench.one(rows)
    bench.open(rows)  # its finder knows nothing yet
    resumed = LoadedSource(ListSource([before]), bench.loader)
    with pytest.raises(MediaError, match=r"one.png\) cannot be found again: .* ListSource has no recall"):
        resumed.adopt([before])


def test_a_tool_shows_an_image_as_long_as_its_prompt_lives(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    prompt = bench.one(write_rows({"prompt": "a"}))
    mark = bench.processor.marks["image"]
    tokens = bench.tokenizer(f"see {mark}.", add_special_tokens=False)["input_ids"]
    parts = [{"type": "text", "text": "see "}, {"type": "image", "image": picture(16, 16)}, "."]
    found, media = bench.loader.show(
        [{"role": "tool", "content": parts}],
        prompt,
        lambda messages: tuple(
            bench.tokenizer(messages[0]["content"], add_special_tokens=False)["input_ids"]
        ),
    )
    assert len(found) == len(tokens) + 3
    assert media[0].spans == ((5, 4),)
    assert bench.store.has(media[0].key)
    del prompt
    assert bench.store.bytes() == 0


def test_what_a_tool_cannot_show_is_named_and_is_no_row(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    prompt = bench.one(write_rows({"prompt": "a"}))

    def told(image: Any) -> str:
        parts = [{"type": "image", "image": image}]
        with pytest.raises(MediaError) as caught:
            bench.loader.show([{"role": "tool", "content": parts}], prompt, lambda messages: ())
        return str(caught.value)

    assert told("none.png").startswith(f"image 1 (none.png) cannot be found: {Path.cwd()}/none.png does not")
    assert told(b"text").startswith("image 1 (in a message) is not in a supported image format")
    assert told(np.zeros((2, 2))).startswith("image 1 (ndarray) is given as ndarray")
    for image in (b"text", "none.png", 7):
        assert not any(words in told(image) for words in ("row", "data file", "jsonl"))


def test_relative_paths_of_tools_start_from_the_root(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "one.png").write_bytes(png(picture()))
    prompt = bench.one(write_rows({"prompt": "a"}), {"root": tmp_path / "shown"})
    mark = bench.tokenizer(bench.processor.marks["image"], add_special_tokens=False)["input_ids"]
    parts = [{"type": "image", "image": "one.png"}]
    _, media = bench.loader.show([{"role": "tool", "content": parts}], prompt, lambda messages: tuple(mark))
    assert bench.store.has(media[0].key)


def test_a_message_with_too_many_images_is_refused_before_one_is_decoded(
    bench: Bench, write_rows: WriteRows
) -> None:
    prompt = bench.one(write_rows({"prompt": "a"}), {"max_per_sample": 2})
    parts = [{"type": "image", "image": picture()}] * 3
    with pytest.raises(MediaError, match=r"has 3 media; media\.max_per_sample allows 2"):
        bench.loader.show([{"role": "tool", "content": parts}], prompt, lambda messages: ())
    assert bench.store.bytes() == 0


MODES = (
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGBA",
    "RGBa",
    "RGBX",
    "1",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "I;16",
    "F",
)


@pytest.mark.parametrize("mode", MODES)
def test_an_image_of_pillow_of_any_mode_is_taken(mode: str) -> None:
    image = Image.new(mode, (5, 3))
    source = source_of("image", image, Path(), Settings())
    with source.open() as file:
        assert np.array_equal(decode_image(file, 384), as_pixels(image))


def test_an_image_of_pillow_is_turned_as_its_file_is(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    (tmp_path / "a.jpg").write_bytes(png(picture(), format="JPEG", exif=turned))
    file = source_of("image", "a.jpg", tmp_path, Settings())
    given = source_of("image", Image.open(tmp_path / "a.jpg"), tmp_path, Settings())
    assert header_of("image", given).size == header_of("image", file).size == (24, 16)


@pytest.mark.parametrize("what", ["empty", "half"])
def test_an_image_of_pillow_that_cannot_be_read_is_an_error_of_media(what: str) -> None:
    half = Image.open(io.BytesIO(png(Image.effect_noise((200, 200), 50))[:2000]))
    with pytest.raises(MediaError, match="cannot be decoded"):
        source_of("image", half if what == "half" else picture(0, 5), Path(), Settings())


def test_one_dictionary_of_settings_decides_whether_an_index_is_used_again(
    bench: Bench, write_rows: WriteRows, tmp_path: Path
) -> None:
    (tmp_path / "one.png").write_bytes(png(picture()))
    rows = write_rows({"prompt": "<image>", "images": "one.png"})
    lengths = [len(bench.one(rows, limits).tokens) for limits in ({}, {"max_pixels": 64}, {})]
    assert lengths == [9, 4, 9]
    entries = list((tmp_path / "cache").rglob("index.json"))
    assert len(entries) == 2
    assert all("processor" in json.loads(path.read_text())["key"]["reader"]["media"] for path in entries)
