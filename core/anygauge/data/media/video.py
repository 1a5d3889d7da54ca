"""Videos as frames: lists and folders of images, animations that Pillow reads, and the rest by PyAV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from anygauge.config.schema import Media as Settings
from anygauge.data.media.decode import (
    BROKEN,
    as_pixels,
    check_pixels,
    decode_image,
    decoding,
    image_header,
    open_image,
)
from anygauge.data.media.sources import Source
from anygauge.extras import install_extra
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Decoded, Header

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

__all__ = ["decode_video", "video_header"]

_ANIMATIONS = (b"GIF8", b"\x89PNG", b"RIFF")
"""How files begin that Pillow reads; ``RIFF`` is also how AVI does."""
_DEFAULT_S = 0.1
"""Shown of a frame whose animation does not say how long, as browsers do."""
_MOST_FRAMES = 50_000
"""Most frames of an animation."""
_CONTAINER_OPTIONS = {
    "format_whitelist": "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,mpegvideo,h264,hevc,ivf,dv",
    "protocol_whitelist": "none",
}
"""FFmpeg options that accept only files with their frames inside. Playlists and session descriptions (HLS,
DASH, concat, SDP) make it open other files, fetch from any host, and listen."""


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
                headers.append(image_header(file, source.settings.max_image_pixels))
        _check_sizes([header.size for header in headers])
        first = headers[0]
        count, fps = len(source.frames), source.settings.fps
        return first._replace(frames=count, fps=fps, duration=count / fps)
    with source.open() as file:
        return (_animation_header if _is_animation(file) else _stream_header)(file, source.settings)


def decode_video(source: Source, header: Header, times: Sequence[float]) -> Decoded:
    """Return the frames that are shown at some times, in seconds.

    Each is decoded when it is iterated over: 64 frames of 4K are 1.6 GB before they are resized.

    :param header: From :func:`video_header`.
    :raises MediaError: In an iteration: they cannot be decoded, or differ in size; a clause.
    """
    return Decoded(frames=_Frames(source, header, times), times=list(times))


class _Frames(Sequence[Any]):
    """Some frames of a video. Each iteration decodes them, and holds one at a time."""

    def __init__(self, source: Source, header: Header, times: Sequence[float]) -> None:
        self._source = source
        self._count = header.frames
        self._wanted = [min(round(time * header.fps), header.frames - 1) for time in times]

    def __len__(self) -> int:
        return len(self._wanted)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return next(islice(self, range(len(self))[index], None))

    def __iter__(self) -> Iterator[NDArray[Any]]:
        decoded: Iterator[tuple[int, NDArray[Any]]] = iter(())
        number, frame = self._count, np.empty(0)
        first = None
        for wanted in self._wanted:
            if wanted < number:  # backwards, or the first: from the beginning
                number, decoded = -1, _frames(self._source, set(self._wanted))
            while number != wanted:
                number, frame = next(decoded, (self._count, frame))
                if number == self._count:
                    raise MediaError(f"ends before its frame {wanted} of {self._count}.", hint=BROKEN)
            first = first or frame.shape[:2]
            _check_sizes([first, frame.shape[:2]])
            yield frame


def _check_sizes(sizes: Sequence[tuple[int, ...]]) -> None:
    odd = next((size for size in sizes if size != sizes[0]), None)
    if odd is not None:
        raise MediaError(
            f"has frames of different sizes: {sizes[0]} and {odd}.", hint="Bring them to one size."
        )


def _check_work(count: int, size: tuple[int, int], settings: Settings) -> None:
    """Refuse a video that takes too long: to show one frame, all before it are decoded.

    :param size: Width and height.
    :raises MediaError: Its frames, or all of them together, have too many pixels; a clause.
    """
    check_pixels(size, settings.max_image_pixels)
    if count * size[0] * size[1] > settings.max_video_pixels:
        raise MediaError(
            f"has {count} frames of {size[0]}x{size[1]} pixels; media.max_video_pixels allows "
            f"{settings.max_video_pixels} in all.",
            hint="Cut it, make it smaller or give a list of frames, or raise media.max_video_pixels.",
        )


def _frames(source: Source, wanted: set[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield number and pixels of frames, in order."""
    most = source.settings.max_image_pixels
    for number in sorted(wanted) if source.frames else ():
        with source.frames[number].open() as file:
            yield number, decode_image(file, most)
    if not source.frames:
        with source.open() as file:
            yield from (_animation_frames if _is_animation(file) else _stream_frames)(file, wanted, most)


# -------------------------------------------------------------------------
# Animations
# -------------------------------------------------------------------------


def _is_animation(file: BinaryIO) -> bool:
    begin = file.read(12)
    file.seek(0)
    return begin.startswith(_ANIMATIONS) and begin[8:12] != b"AVI "


def _animation_header(file: BinaryIO, settings: Settings) -> Header:
    with open_image(file, settings.max_image_pixels) as image:
        width, height = image.size
        count = _count_frames(image)
        _check_work(count, (width, height), settings)
        _check_frames(count)
        duration = 0.0
        for number in range(count):
            image.seek(number)
            _check_sizes([(height, width), image.size[::-1]])  # a frame of a GIF may be larger than the first
            if image.format == "WEBP":
                image.load()  # before that, Pillow does not know how long a frame is shown
            duration += image.info.get("duration", 0) / 1000 or _DEFAULT_S
        return Header((height, width), count, count / duration, duration, image.format or "")


def _count_frames(image: Image) -> int:
    """Return the number of frames, or a number that is too large; none is decoded."""
    from PIL.GifImagePlugin import GifImageFile

    if not isinstance(image, GifImageFile):
        return int(getattr(image, "n_frames", 1))
    # As image.n_frames, which would go through millions of frames.
    count = 1
    with suppress(EOFError):
        while count <= _MOST_FRAMES:
            image._seek(count, False)
            count += 1
    return count


def _check_frames(count: int) -> None:
    """Refuse an animation that takes too long: each frame takes some 50 us, of one pixel too.

    :raises MediaError: A clause.
    """
    if count > _MOST_FRAMES:
        raise MediaError(
            f"is an animation of more than {_MOST_FRAMES} frames.", hint="Cut it, or make a video of it."
        )


def _animation_frames(file: BinaryIO, wanted: set[int], most: int) -> Iterator[tuple[int, NDArray[Any]]]:
    with open_image(file, most) as image:
        for number in sorted(wanted):
            image.seek(number)
            check_pixels(image.size, most)
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
            hint=f"Give a list of frames, or {install_extra('media')}",
        ) from error
    with decoding(), av.open(file, container_options=_CONTAINER_OPTIONS) as container:
        if not container.streams.video:
            raise MediaError("has no video frames.", hint=BROKEN)
        yield container


def _stream_header(file: BinaryIO, settings: Settings) -> Header:
    with _container(file) as container:
        stream = container.streams.video[0]
        check_pixels((stream.width, stream.height), settings.max_image_pixels)
        # Where the file does not say how many frames it has, its packets are counted.
        count = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        fps = float(stream.average_rate or 0) or float(stream.guessed_rate or 0)
        if not count or not fps:
            raise MediaError("does not say how long it is.", hint=BROKEN)
        _check_work(count, (stream.width, stream.height), settings)
        return Header((stream.height, stream.width), count, fps, count / fps, container.format.name)


def _stream_frames(file: BinaryIO, wanted: set[int], most: int) -> Iterator[tuple[int, NDArray[Any]]]:
    with _container(file) as container:
        last = max(wanted)
        # A stream may change its size; FFmpeg refuses what is larger before it allocates a frame.
        container.streams.video[0].codec_context.options = {"max_pixels": str(most)}
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                yield number, np.asarray(frame.to_ndarray(format="rgb24"))
            if number == last:
                return
