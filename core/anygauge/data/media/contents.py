"""Read the header and the content of a media file of any kind."""

from __future__ import annotations

from hashlib import blake2b

from anygauge.data.media.audio import audio_header, decode_audio
from anygauge.data.media.decode import decode_image, image_header
from anygauge.data.media.sources import Source
from anygauge.data.media.video import decode_video, video_header
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Content, Decoded, Header, Measured, MediaKind, MediaProcessor

__all__ = ["content_of", "header_of", "key_of"]


def header_of(kind: MediaKind, source: Source) -> Header:
    """Read the header of a medium, without decoding it.

    :raises MediaError: It cannot be read; a clause.
    """
    if kind == "video":
        return video_header(source)
    if kind == "audio":
        return audio_header(source)
    with source.open() as file:
        return image_header(file, source.settings.max_image_pixels)


def content_of(kind: MediaKind, source: Source, measured: Measured, processor: MediaProcessor) -> Content:
    """Return the content of a medium.

    :raises MediaError: It cannot be decoded, or is not what it was when it was measured; a clause.
    """
    content = processor.load(kind, _decoded(kind, source, measured), measured)
    if kind == "image" and content.data.shape[:2] != measured.size:
        raise MediaError("has a different size than its header says.", hint="Replace the file.")
    return content


def key_of(kind: MediaKind, source: Source, measured: Measured, fingerprint: str) -> str:
    """Return the key of the content that a medium will have.

    :param fingerprint: Fingerprint of the processor.
    :raises MediaError: Its bytes cannot be read; a clause.
    """
    made_by = (kind, fingerprint, measured.grid, measured.size, measured.times)
    digest = blake2b(repr(made_by).encode(), digest_size=16)
    for piece in source.pieces():
        digest.update(blake2b(piece, digest_size=32).digest())
    return digest.hexdigest()


def _decoded(kind: MediaKind, source: Source, measured: Measured) -> Decoded:
    if kind == "video":
        return decode_video(source, video_header(source), measured.times)
    if kind == "audio":
        return decode_audio(source)
    with source.open() as file:
        return Decoded(frames=[decode_image(file, source.settings.max_image_pixels)])
