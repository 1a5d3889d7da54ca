"""Images as pixels, and what their headers say. Pillow is imported when the first one is looked at."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Decoded, Header

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

__all__ = ["as_pixels", "decode_image", "image_header", "open_image"]

BROKEN = "Replace the file, or take the row out."
_ORIENTATION = 0x0112
_TURNED = {5, 6, 7, 8}
"""Orientations of Exif that exchange height and width."""


def image_header(raw: bytes) -> Header:
    """Return what the header of an image says; no pixel is decoded.

    :raises MediaError: It is no image that Pillow knows; a clause.
    """
    with open_image(raw) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION) in _TURNED:
            width, height = height, width
        return Header(size=(height, width), frames=1, format=image.format or "")


def decode_image(raw: bytes) -> Decoded:
    """Return the pixels of an image, or of the first one of an animation.

    :raises MediaError: It cannot be decoded; a clause.
    """
    with open_image(raw) as image:
        return Decoded(frames=[as_pixels(image)])


@contextmanager
def open_image(raw: bytes) -> Iterator[Image]:
    """Open an image, and make what Pillow raises in the block the project's own error.

    :raises MediaError: A clause.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            # Size limits are the project's own; metadata that Pillow cannot read changes no pixel.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(raw)) as image:
                yield image
    except UnidentifiedImageError as error:
        raise MediaError("is of no image format that Pillow knows.", hint=BROKEN) from error
    except Exception as error:
        if isinstance(error, MediaError):
            raise
        # Decoders raise nearly everything: OSError, SyntaxError, ValueError, struct.error, zlib.error.
        raise MediaError(f"cannot be decoded: {error or type(error).__name__}", hint=BROKEN) from error


def as_pixels(image: Image) -> NDArray[Any]:
    """Return RGB on white, turned as the camera says, uint8 ``[height, width, 3]``.

    Sixteen bits of grey are brought to eight by their upper ones.
    """
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = _on_white(image.convert("RGBA"))
    return np.ascontiguousarray(image.convert("RGB"))


def _eight_bits(image: Image) -> Image:
    from PIL import Image

    values = np.asarray(image, np.float64)
    scale = 1.0 if image.mode == "F" else 256.0
    return Image.fromarray(np.clip(values / scale, 0, 255).astype(np.uint8))


def _on_white(image: Image) -> Image:
    from PIL import Image

    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image)
