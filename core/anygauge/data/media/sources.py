"""Sources of a medium's bytes: a file, the row itself, a URL, or a Pillow object."""

from __future__ import annotations

import base64
import io
import os
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from anygauge.config.data_files import NO_FILE, why_no_file
from anygauge.config.schema import Media as Settings
from anygauge.data.media.decode import BROKEN, as_pixels, decoding
from anygauge.data.media.fetch import fetch
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import MediaKind

__all__ = ["Source", "source_of"]

_ADDRESS = re.compile(r"https?://", re.IGNORECASE)
_DATA = re.compile(r"data:[^,]*,")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{40,}+={0,2}\s*+")
"""Text that is no file name. Possessive: else the time is quadratic in a run of spaces."""
_LONGEST_NAME = 80
_LONGEST_PATH = 1024
"""Characters; a longer text in the letters of base64 is no path."""
_BEGINNINGS = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*"),
    *(b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\x1aE\xdf\xa3"),
)
"""Magic bytes of media files."""
_IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
"""Suffixes of files that are frames of a video when they are in a folder."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Source:
    """One medium before it is looked at. Of ``path``, ``raw`` and ``frames`` it has one."""

    name: str
    """For errors."""
    settings: Settings
    path: Path | None = None
    raw: bytes | None = field(default=None, repr=False)
    frames: tuple[Source, ...] = ()
    """Frames of a video that is given as images."""

    @property
    def is_large(self) -> bool:
        """Whether the object holds the bytes itself, instead of a path."""
        return self.raw is not None or any(frame.is_large for frame in self.frames)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open it for reading.

        :raises MediaError: It is no file, or larger than ``media.max_bytes``; a clause.
        """
        if self.raw is not None:
            _check_size(len(self.raw), self.settings.max_bytes)
            yield io.BytesIO(self.raw)
            return
        assert self.path is not None
        problem = why_no_file(self.path)
        if problem is not None:
            text = f"cannot be found: {self.path} does not exist" if problem == NO_FILE else problem
            text = "is a directory" if os.path.isdir(self.path) else text
            raise MediaError(f"{text}.", hint="Set media.root, if relative paths start elsewhere.")
        _check_size(self.path.stat().st_size, self.settings.max_bytes)
        try:
            with self.path.open("rb") as file:
                yield file
        except OSError as error:
            raise MediaError(f"cannot be read: {error.strerror or error}.", hint=BROKEN) from error

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes.

        :raises MediaError: They cannot be had; a clause.
        """
        for source in self.frames or (self,):
            with source.open() as file:
                yield file.read()


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise MediaError(
            f"has {size / _MIB:.1f} MiB; media.max_bytes allows {limit / _MIB:.1f}.",
            hint="Make the file smaller, or raise media.max_bytes.",
        )


def source_of(kind: MediaKind, value: Any, folder: Path, settings: Settings) -> Source:
    """Return where a medium is.

    :param value: A path, an address, ``data:`` or base64 text, bytes, an object with ``bytes``, ``path`` or
        ``url``, an image of Pillow's; for a video also a list of images.
    :param folder: Folder that relative paths start from.
    :raises MediaError: It is none of these, or an address that may not be or cannot be fetched; a clause.
    """
    if isinstance(value, Mapping):
        return _of_object(kind, value, folder, settings)
    if isinstance(value, bytes | bytearray):
        return Source("bytes", settings, raw=bytes(value))
    if isinstance(value, str | Path):
        return _of_text(kind, str(value), folder, settings)
    if kind == "video" and isinstance(value, Sequence) and value:
        frames = tuple(source_of("image", frame, folder, settings) for frame in value)
        return Source(f"{len(frames)} frames", settings, frames=frames)
    if hasattr(value, "save") and hasattr(value, "mode"):
        return Source("image of Pillow", settings, raw=_as_png(value))
    raise MediaError(
        f"is given as {type(value).__name__}, not a path, an address, bytes or base64.",
        hint="docs/media.md lists what may be given.",
    )


def _of_object(kind: MediaKind, value: Mapping[str, Any], folder: Path, settings: Settings) -> Source:
    """Return where a medium is that Hugging Face's data sets or a chat message wrote down."""
    for key in ("bytes", "path", "url", kind, f"{kind}_url"):
        if value.get(key) is not None:
            source = source_of(kind, value[key], folder, settings)
            name = value.get("path") if key == "bytes" else None
            return source if name is None else Source(str(name), settings, raw=source.raw)
    raise MediaError(
        f"is an object with {', '.join(map(repr, value)) or 'nothing'}, and none of 'bytes' and 'path'.",
        hint="docs/media.md lists what may be given.",
    )


def _of_text(kind: MediaKind, text: str, folder: Path, settings: Settings) -> Source:
    if _DATA.match(text[:200]):
        return Source("data:", settings, raw=_from_base64(text.partition(",")[2], settings))
    if _ADDRESS.match(text):
        return Source(text[:_LONGEST_NAME], settings, raw=fetch(text, settings))
    if not text.strip():
        raise MediaError("is an empty text.", hint="Give a path, an address or base64.")
    if _BASE64.fullmatch(text) and not _names_file(folder, text) and _is_base64(text, settings):
        return Source("base64", settings, raw=_from_base64(text, settings))
    path = folder / text
    # os.path.isdir, as Path.is_dir raises where a name is too long.
    if kind == "video" and os.path.isdir(path):
        return _of_folder(text, path, settings)
    return Source(text[:_LONGEST_PATH], settings, path=path)


def _of_folder(name: str, folder: Path, settings: Settings) -> Source:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGES)
    if not paths:
        raise MediaError("is a folder without images.", hint="Its images, by name, are the frames.")
    return Source(name, settings, frames=tuple(Source(path.name, settings, path=path) for path in paths))


def _names_file(folder: Path, text: str) -> bool:
    try:
        return (folder / text).exists()
    except (OSError, ValueError):  # too long for a name
        return False


def _is_base64(text: str, settings: Settings) -> bool:
    """Return whether a text in the letters of base64 is that, and not the path of a file that is missing."""
    if len(text) > _LONGEST_PATH:
        return True
    try:
        raw = _from_base64(text, settings)
    except MediaError:
        return False
    return raw.startswith(_BEGINNINGS) or raw[4:8] == b"ftyp"


def _from_base64(text: str, settings: Settings) -> bytes:
    """Return the bytes that a text encodes, whose number is checked first.

    :raises MediaError: It is not base64, or too long; a clause.
    """
    num_letters = len(text) - sum(text.count(each) for each in string.whitespace + "=")
    _check_size(num_letters * 3 // 4, settings.max_bytes)
    try:
        letters = text.encode().translate(None, string.whitespace.encode())
        return base64.b64decode(letters, validate=True)
    except ValueError as error:  # binascii.Error, or half of a surrogate pair
        raise MediaError(f"is not base64: {error}.", hint=BROKEN) from error


def _as_png(image: Any) -> bytes:
    """Return an image of Pillow's as the file that it would be read from."""
    from PIL import Image

    buffer = io.BytesIO()
    with decoding():
        Image.fromarray(as_pixels(image)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
