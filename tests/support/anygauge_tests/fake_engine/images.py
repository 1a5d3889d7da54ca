"""Media of a fake engine: counted, expanded and told apart, as SGLang does; what they show plays no role."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from anygauge.serving.sglang.client.media import CONTENT, read_content
from anygauge_tests.fake_engine.options import Options

__all__ = ["ImageCountError", "expanded", "stand_ins"]


class ImageCountError(Exception):
    """The real server fails without words."""


def expanded(ids: Sequence[int], body: Mapping[str, Any], options: Options) -> list[int]:
    """Return the tokens of a prompt with all that stands for its media.

    :raises ValueError: An image cannot be read.
    :raises ImageCountError: There are other numbers of images and placeholders.
    """
    sent = [each for kind in ("image", "video", "audio") for each in body.get(f"{kind}_data") or ()]
    if any(each.startswith(CONTENT) for each in sent):
        return _with_contents(ids, sent, options)
    images = [_read(each) for each in body.get("image_data") or ()]
    if not images:
        return list(ids)
    if sum(token == options.image_token for token in ids) != len(images):
        raise ImageCountError
    rest = iter(images)
    return [token for id in ids for token in _tokens(id, rest, options)]


def stand_ins(png: bytes, count: int, vocab_size: int) -> list[int]:
    """Return the tokens by which an engine knows an image: others for another one."""
    digest = int.from_bytes(blake2b(png, digest_size=8).digest(), "little")
    return [(digest >> (place % 48)) % (vocab_size // 2) for place in range(count)]


def _with_contents(ids: Sequence[int], sent: Sequence[str], options: Options) -> list[int]:
    """Return tokens with what stands for contents in the places that these name."""
    shown = list(ids)
    for each in sent:
        medium, data = read_content(each)
        for start, count in medium.spans:
            shown[start : start + count] = stand_ins(data, count, options.vocab_size)
    return shown


def _tokens(id: int, images: Iterator[tuple[bytes, tuple[int, int]]], options: Options) -> list[int]:
    if id != options.image_token:
        return [id]
    png, (width, height) = next(images)
    count = (width // options.image_factor) * (height // options.image_factor)
    return stand_ins(png, count, options.vocab_size)


def _read(data: str) -> tuple[bytes, tuple[int, int]]:
    """Return an image's file, and its width and height."""
    from PIL import Image

    raw = base64.b64decode(data)
    try:
        with Image.open(io.BytesIO(raw)) as image:
            image.load()
            return raw, image.size
    except (OSError, SyntaxError) as error:
        raise ValueError(f"The image cannot be read: {error}") from error
