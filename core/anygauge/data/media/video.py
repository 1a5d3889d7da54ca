"""Videos as frames: lists and folders of images, animations that Pillow reads, and the rest by PyAV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from anygauge.data.media.decode import BROKEN, as_pixels, decode_image, decoding, image_header, open_image
from anygauge.data.media.sources import Source
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Decoded, Header

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["decode_video", "video_header"]

_ANIMATIONS = (b"GIF8", b"\x89PNG", b"RIFF")
"""How files begin that Pillow reads; ``RIFF`` is also how AVI does."""
_DEFAULT_S = 0.1
"""Shown of a frame whose animation does not say how long, as browsers do."""


def video_header(source: Source) -> Header:
    """Return size, number of frames and rate of a video.

    Images that are given as frames count as taken at ``media.fps``.

    :raises MediaError: It cannot be read, its frames differ in size, or nothing that reads it is installed; a
        clause.
    """
    if source.frames:
        headers = []
        for frame in source.frames:
            with frame.open() as file:
                headers.append(image_header(file))
        _check_sizes([header.size for header in headers])
        first = headers[0]
        count, fps = len(source.frames), source.settings.fps
        return first._replace(frames=count, fps=fps, duration=count / fps)
    with source.open() as file:
        return _animation_header(file) if _is_animation(file) else _stream_header(file)


def decode_video(source: Source, header: Header, times: Sequence[float]) -> Decoded:
    """Return the frames that are shown at some times, in seconds.

    :param header: From :func:`video_header`.
    :raises MediaError: They cannot be decoded, or differ in size; a clause.
    """
    wanted = [min(round(time * header.fps), header.frames - 1) for time in times]
    found = dict(_frames(source, set(wanted)))
    missing = [number for number in wanted if number not in found]
    if missing:
        raise MediaError(f"ends before its frame {missing[0]} of {header.frames}.", hint=BROKEN)
    _check_sizes([found[number].shape[:2] for number in wanted])
    return Decoded(frames=[found[number] for number in wanted], times=list(times))


def _check_sizes(sizes: Sequence[tuple[int, ...]]) -> None:
    odd = next((size for size in sizes if size != sizes[0]), None)
    if odd is not None:
        raise MediaError(
            f"has frames of different sizes: {sizes[0]} and {odd}.", hint="Bring them to one size."
        )


def _frames(source: Source, wanted: set[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    for number in sorted(wanted) if source.frames else ():
        with source.frames[number].open() as file:
            yield number, decode_image(file)
    if not source.frames:
        with source.open() as file:
            yield from (_animation_frames if _is_animation(file) else _stream_frames)(file, wanted)


# -------------------------------------------------------------------------
# Animations
# -------------------------------------------------------------------------


def _is_animation(file: BinaryIO) -> bool:
    begin = file.read(12)
    file.seek(0)
    return begin.startswith(_ANIMATIONS) and begin[8:12] != b"AVI "


def _animation_header(file: BinaryIO) -> Header:
    with open_image(file) as image:
        width, height = image.size
        count = getattr(image, "n_frames", 1)
        duration = 0.0
        for number in range(count):
            image.seek(number)
            if image.format == "WEBP":
                image.load()  # before that, Pillow does not know how long a frame is shown
            duration += image.info.get("duration", 0) / 1000 or _DEFAULT_S
        return Header((height, width), count, count / duration, duration, image.format or "")


def _animation_frames(file: BinaryIO, wanted: set[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    with open_image(file) as image:
        for number in sorted(wanted):
            image.seek(number)
            yield number, as_pixels(image)


# -------------------------------------------------------------------------
# Streams
# -------------------------------------------------------------------------


@contextmanager
def _container(file: BinaryIO) -> Iterator[Any]:
    try:
        import av
    except ImportError as error:
        raise MediaError(
            "is a video that needs PyAV, which is not installed.",
            hint="pip install 'anygauge[media]', or give a list of frames.",
        ) from error
    with decoding(), av.open(file) as container:
        if not container.streams.video:
            raise MediaError("has no pictures.", hint=BROKEN)
        yield container


def _stream_header(file: BinaryIO) -> Header:
    with _container(file) as container:
        stream = container.streams.video[0]
        # Where the file does not say how many frames it has, its packets are counted.
        count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        fps = float(stream.average_rate or 0) or float(stream.guessed_rate or 0)
        if not count or not fps:
            raise MediaError("does not say how long it is.", hint=BROKEN)
        return Header((stream.height, stream.width), count, fps, count / fps, container.format.name)


def _stream_frames(file: BinaryIO, wanted: set[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    with _container(file) as container:
        last = max(wanted)
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                yield number, np.asarray(frame.to_ndarray(format="rgb24"))
            if number == last:
                return
