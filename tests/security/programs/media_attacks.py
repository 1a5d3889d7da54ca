"""Look at hostile media, with 1 GiB more memory than the imports take; print what each was refused with."""

from __future__ import annotations

import io
import json
import resource
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from anygauge.config.schema import Media as Settings
from anygauge.data.media.audio import audio_header, decode_audio
from anygauge.data.media.contents import header_of
from anygauge.data.media.decode import decode_image, image_header
from anygauge.data.media.sources import Source, source_of
from anygauge.data.media.video import decode_video, video_header
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Header

SETTINGS = Settings()
GIB = 2**30
Image.init()


def of(raw: bytes, settings: Settings = SETTINGS) -> Source:
    return Source("attack", settings, raw=raw)


# -------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------


def wav(rate: int, frames: int = 100, *, claimed: int | None = None, channels: int = 1) -> bytes:
    size = frames * channels * 2
    form = struct.pack("<HHIIHH", 1, channels, rate, 0, 2 * channels % 2**16, 16)
    data = b"data" + struct.pack("<I", size if claimed is None else claimed)
    body = b"WAVEfmt " + struct.pack("<I", 16) + form + data + bytes(size)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, frames: int = 0) -> bytes:
    """Return a black image of one bit a pixel: 169 million of them in 21 KB."""
    rows = zlib.compress(bytes((width // 8 + 1) * height), 1)
    moves = chunk(b"acTL", struct.pack(">II", frames, 0)) if frames else b""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + moves + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def transparent(side: int) -> bytes:
    """Return a square image of four bytes a pixel."""
    row = bytes(4 * side + 1)
    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def tiff(side: int, tile: int) -> bytes:
    """Return an image in one tile, which is decoded as a whole whatever of it the image shows."""
    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(bytes(tile)) for _ in range(tile)) + packer.flush()
    tags = {
        256: side,
        257: side,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: tile,
        323: tile,
        324: 0,
        325: len(data),
    }
    tags[324] = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def gif(size: tuple[int, int], *frames: tuple[int, int]) -> bytes:
    """Return an animation of one pixel in each frame, whatever their sizes."""
    screen = b"GIF89a" + struct.pack("<HHBBB", *size, 0x80, 0, 0) + bytes(6)
    pixel = b"\x02\x02\x44\x01\0"
    return screen + b"".join(b"," + struct.pack("<HHHHB", 0, 0, *each, 0) + pixel for each in frames) + b";"


def webp(side: int) -> bytes:
    """Return a small animation that claims a large canvas."""
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), (shade, 0, 0)) for shade in (1, 200)]
    frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:])
    raw = bytearray(buffer.getvalue())
    at = raw.index(b"VP8X") + 12
    raw[at : at + 6] = (side - 1).to_bytes(3, "little") * 2
    return bytes(raw)


def ico(image: bytes) -> bytes:
    """Return an icon of 16x16 pixels by its header, around a larger image."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(image), 22) + image


def jpeg(width: int, height: int) -> bytes:
    """Return a small photo that claims another size."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16)).save(buffer, "JPEG")
    raw = bytearray(buffer.getvalue())
    at = raw.index(b"\xff\xc0") + 5
    raw[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(raw)


def scans(side: int, count: int) -> bytes:
    """Return a photo that is gone over again and again, 75 bytes each time."""
    buffer = io.BytesIO()
    Image.new("L", (side, side)).save(buffer, "JPEG", progressive=True)
    raw = buffer.getvalue()[:-2]
    return raw + raw[raw.rindex(b"\xff\xda") :] * count + b"\xff\xd9"


# -------------------------------------------------------------------------
# Attacks
# -------------------------------------------------------------------------


def heard(raw: bytes, settings: Settings = SETTINGS) -> str:
    source = of(raw, settings)
    header = audio_header(source)
    samples = decode_audio(source).samples
    assert samples is not None
    return f"{len(samples)} samples of {header.duration:.3g} s"


def shown(raw: bytes) -> str:
    source = of(raw)
    with source.open() as file:
        height, width = image_header(file, SETTINGS.max_image_pixels).size
    with source.open() as file:
        assert decode_image(file, SETTINGS.max_image_pixels).shape == (height, width, 3)
    return f"{width}x{height}"


def played(raw: bytes) -> str:
    source = of(raw)
    header = video_header(source)
    times = [number / header.fps for number in np.linspace(0, header.frames - 1, 64)]
    count = sum(1 for _ in decode_video(source, header, times).frames)
    return f"{count} of {header.frames} frames"


def swapped() -> str:
    """Decode what grew after it was measured, as an address may."""
    header = Header((16, 16), 2, 1.0, 2.0)
    source = of(gif((16, 16), (1, 1), (9_000, 9_000)))
    return f"{len(list(decode_video(source, header, [1.0]).frames))} frames"


def text(value: str, kind: Any = "image") -> str:
    return str(header_of(kind, source_of(kind, value, Path(), SETTINGS)))


QUICK: dict[str, Callable[[], str]] = {
    **{f"wav {rate}": lambda rate=rate: heard(wav(rate)) for rate in (0, 192_001, 500_009, 1_000_003)},
    "wav 2**32 - 1": lambda: heard(wav(2**32 - 1)),
    "wav 2**31": lambda: heard(wav(2**31)),
    "wav 384000": lambda: heard(wav(384_000, 384_000)),
    "wav 65519": lambda: heard(wav(65_519, 65_519)),
    "wav 1": lambda: heard(wav(1, 20)),
    "wav claims 4 GiB": lambda: heard(wav(48_000, claimed=2**32 - 2)),
    "wav grew": lambda: str(decode_audio(of(wav(8_000, 8_000 * 31)))),
    "wav of 65535 channels": lambda: heard(wav(8_000, 100, channels=65_535)),
    "png": lambda: shown(png(13_000, 13_000)),
    "tiff of one large tile": lambda: shown(tiff(16, 16_384)),
    "tiff of one tile": lambda: shown(tiff(16, 64)),
    "icon": lambda: shown(ico(png(13_000, 13_000))),
    "jpeg": lambda: shown(jpeg(65_000, 1_000)),
    "jpeg of many scans": lambda: shown(scans(2_000, 100_000)),
    "jpeg of some scans": lambda: shown(scans(64, 100)),
    "webp": lambda: played(webp(9_000)),
    "webp of one image": lambda: shown(webp(9_000)),
    "apng": lambda: played(png(1_000, 1_000, frames=2**31 - 1)),
    "apng without its frames": lambda: played(png(16, 16, frames=100)),
    "gif": lambda: played(gif((4_000, 4_000), *[(1, 1)] * 3_000)),
    "gif that grows": lambda: played(gif((16, 16), (1, 1), (9_000, 9_000))),
    "gif that grew": swapped,
    "base64": lambda: text("A" * (87 * 2**20)),
    "data": lambda: text("data:image/png;base64," + "A" * (300 * 2**20)),
    "spaces": lambda: text("A" * 40 + " " * 300_000 + "!"),
}
HEAVY: dict[str, Callable[[], str]] = {
    "largest png": lambda: shown(png(7_000, 7_000)),
    "largest transparent png": lambda: shown(transparent(7_000)),
    "64 large frames": lambda: played(gif((5_000, 5_000), *[(1, 1)] * 64)),
    "whole file of wav": lambda: heard(wav(384_000, 30 * 384_000, channels=2), Settings(max_bytes=2**26)),
}


def outcome(attack: Callable[[], str]) -> str:
    try:
        return attack()
    except MediaError as error:
        return str(error.args[0])


def main() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + GIB, now + GIB))
    attacks = QUICK if sys.argv[1] == "quick" else HEAVY
    print(json.dumps({name: outcome(attack) for name, attack in attacks.items()}))


if __name__ == "__main__":
    main()
