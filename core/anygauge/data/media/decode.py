"""Image decoding, and the facts in image headers. Pillow is imported at the first image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Header

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

__all__ = ["BROKEN", "as_pixels", "check_pixels", "decode_image", "decoding", "image_header", "open_image"]

BROKEN = "Replace the file, or leave it out."
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Formats whose header has the decoded size. Others start Ghostscript (EPS), inflate without a limit (FITS),
or decode an embedded image that is larger than their header says (ICO, ICNS)."""
_CONVERT = f"The formats are {', '.join(_FORMATS)}: convert the file, or leave it out."
_DECODED_IN_PYTHON = ("ppm_plain", "bmp_rle")
"""Codecs of Pillow that take a minute for 64 MiB, and one of them hours where the text has comments."""
_SCAN, _MOST_SCANS = b"\xff\xda", 500
"""A progressive JPEG has some 10 scans, and the pictures and profiles in its header a few such bytes."""
_ROWS = 256
"""Rows of pixels that are put on white at once."""
_TILE_SIZE = (322, 323)
"""Tags of a TIFF file: width and height of a tile."""
_ORIENTATION = 0x0112
_ORIENTATIONS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's transposition that undoes each Exif orientation."""
_SIDEWAYS = {5, 6, 7, 8}
"""Orientations that exchange height and width."""


def image_header(file: BinaryIO, most: int) -> Header:
    """Read the header of an image, without decoding pixels.

    :param most: ``media.max_image_pixels``.
    :raises MediaError: It is no image that Pillow knows, or a larger one; a clause.
    """
    with open_image(file, most) as image:
        width, height = image.size
        if _orientation(image) in _SIDEWAYS:
            width, height = height, width
        return Header(size=(height, width), format=image.format or "")


def decode_image(file: BinaryIO, most: int) -> NDArray[Any]:
    """Return the pixels of an image, or of the first one of an animation, as :func:`as_pixels` does.

    :param most: ``media.max_image_pixels``.
    :raises MediaError: It cannot be decoded, or is larger; a clause.
    """
    with open_image(file, most) as image:
        if image.format in ("JPEG", "MPO"):
            _check_scans(file)
        return as_pixels(image)


def _check_scans(file: BinaryIO) -> None:
    """Refuse a progressive JPEG with thousands of scans, each of which goes over the whole image.

    :raises MediaError: A clause.
    """
    place = file.tell()
    file.seek(0)
    count = file.read().count(_SCAN)
    file.seek(place)
    if count > _MOST_SCANS:
        raise MediaError(f"is a JPEG file of {count} scans; at most {_MOST_SCANS} are read.", hint=BROKEN)


@contextmanager
def open_image(file: BinaryIO, most: int) -> Iterator[Image]:
    """Open an image, and translate Pillow's exceptions in the block.

    :param most: Pixels that it may have. A file of 1 MB can claim a billion.
    :raises MediaError: A clause.
    """
    from PIL import Image, UnidentifiedImageError

    Image.init()
    with decoding():
        try:
            image = Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN])
        except UnidentifiedImageError as error:
            raise MediaError("is not in a supported image format.", hint=_CONVERT) from error
        with image:
            check_pixels(image.size, most)
            _check_tiles(image, most)
            if any(tile[0] in _DECODED_IN_PYTHON for tile in getattr(image, "tile", ())):
                raise MediaError("is a PPM file in text or a compressed BMP file.", hint=_CONVERT)
            yield image


def check_pixels(size: tuple[int, int], most: int) -> None:
    """Refuse an image, or a frame, before it is decoded.

    :param size: Width and height.
    :param most: ``media.max_image_pixels``.
    :raises MediaError: It has more pixels; a clause.
    """
    width, height = size
    if width * height > most:
        raise MediaError(
            f"is {width}x{height} pixels; media.max_image_pixels allows {most}.",
            hint="Make the image smaller, or raise media.max_image_pixels.",
        )


def _check_tiles(image: Image, most: int) -> None:
    """Refuse a TIFF file whose tiles are larger than an image may be: each is decoded as a whole.

    :raises MediaError: A clause.
    """
    tags = getattr(image, "tag_v2", {})
    width, height = (tags.get(tag, 0) for tag in _TILE_SIZE)
    if width * height > most:
        raise MediaError(
            f"is an image in tiles of {width}x{height} pixels; media.max_image_pixels allows {most}.",
            hint=_CONVERT,
        )


@contextmanager
def decoding() -> Iterator[None]:
    """Make whatever a decoder raises in the block the project's own error.

    :raises MediaError: A clause.
    """
    try:
        yield
    except MediaError:
        raise
    except Exception as error:  # foreign code: decoders
        # Decoders raise nearly everything: OSError, SyntaxError, ValueError, struct.error, zlib.error.
        what = str(error).rstrip(".") or type(error).__name__
        raise MediaError(f"cannot be decoded: {what}.", hint=BROKEN) from error


def as_pixels(image: Image) -> NDArray[Any]:
    """Return RGB on white, turned as the camera says, uint8 ``[height, width, 3]``.

    Sixteen bits of gray are brought to eight by their upper ones.
    """
    from PIL import Image

    turn = _ORIENTATIONS.get(_orientation(image))
    if turn is not None:
        image = image.transpose(Image.Transpose(turn))
    if image.mode.startswith("I") or image.mode == "F":
        image = _eight_bits(image)
    if image.mode == "La":  # which becomes nothing else
        image = image.convert("LA")
    if image.has_transparency_data:
        return _on_white(image)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _orientation(image: Image) -> int:
    # To look for what a PNG says behind its pixels, Pillow would decode them.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if isinstance(orientation, int) else 1


def _eight_bits(image: Image) -> Image:
    from PIL import Image

    scale = 1 if image.mode == "F" else 256
    return Image.fromarray(np.clip(np.asarray(image) // scale, 0, 255).astype(np.uint8))


def _on_white(image: Image) -> NDArray[Any]:
    from PIL import Image

    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(
        0, height, _ROWS
    ):  # each step copies its pixels: all at once, they would not fit into 1 GiB
        rows = image.crop((0, top, width, min(top + _ROWS, height))).convert("RGBA")
        white = Image.new("RGBA", rows.size, (255, 255, 255, 255))
        pixels[top : top + _ROWS] = np.asarray(Image.alpha_composite(white, rows).convert("RGB"))
    return pixels
