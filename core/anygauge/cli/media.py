"""Decoders for images, video and audio that are installed here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

__all__ = ["MediaRow", "read_media"]

_READERS = (
    ("images, animations", "pillow", "pip install pillow"),
    ("mp4 and other video", "av", "pip install 'anygauge[media]'"),
    ("sound other than WAV", "soundfile", "pip install 'anygauge[media]'"),
)


@dataclass(frozen=True, slots=True)
class MediaRow:
    """One kind of files."""

    name: str
    status: Literal["PASS", "NOT INSTALLED"]
    found: str
    fix: str | None


def read_media() -> list[MediaRow]:
    """Return what can be read, and what to install for the rest. Nothing is imported."""
    return [_row(*each) for each in _READERS]


def _row(name: str, distribution: str, fix: str) -> MediaRow:
    try:
        return MediaRow(name, "PASS", f"{distribution} {version(distribution)}", None)
    except PackageNotFoundError:
        return MediaRow(name, "NOT INSTALLED", f"{distribution} is not installed", fix)
