"""Images of requests as PNG files, encoded once for all servers.

The server gets each image as the run's own processor has made it, already of its final size, so that nothing
is left for the server to resize and both sides see the same pixels.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anygauge_hooks.errors import RolloutError

if TYPE_CHECKING:
    from anygauge_hooks.media import Media, MediaStore

__all__ = ["ImageEncoder"]

MAX_BYTES = 512 * 2**20
"""Most bytes of encoded images that are cached for later requests."""


class ImageEncoder:
    """PNG files of images, made once for the many requests that show them. Belongs to one event loop.

    :param store: Where the images are.
    :param max_bytes: Most bytes of PNG files that are kept.
    """

    def __init__(self, store: MediaStore, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, asyncio.Future[bytes]] = OrderedDict()
        self._bytes = 0

    async def encoded(self, media: Sequence[Media]) -> list[bytes]:
        """Return each image as a JSON string: base64 of a PNG file.

        :raises RolloutError: One is not in the store.
        """
        images = await asyncio.gather(*(self._one(medium) for medium in media))
        self._forget_oldest()
        return images

    async def _one(self, medium: Media) -> bytes:
        if (making := self._kept.get(medium.key)) is None:
            making = asyncio.ensure_future(asyncio.to_thread(self._encode, medium))
            self._kept[medium.key] = making
            making.add_done_callback(lambda done: self._count(medium.key, done))
        else:
            self._kept.move_to_end(medium.key)
        # a request that is cancelled leaves the others their image
        return await asyncio.shield(making)

    def _count(self, key: str, done: asyncio.Future[bytes]) -> None:
        if done.cancelled() or done.exception() is not None:
            del self._kept[key]  # the next request tries again
        else:
            self._bytes += len(done.result())

    def _forget_oldest(self) -> None:
        while self._bytes > self._max_bytes:
            key, oldest = next(iter(self._kept.items()))
            if not oldest.done():
                return
            self._bytes -= len(oldest.result())
            del self._kept[key]

    def _encode(self, medium: Media) -> bytes:
        from PIL import Image

        try:
            pixels = self._store.get(medium.key).data
        except KeyError as error:
            raise RolloutError(
                f"Image {medium.key} ({medium.source or 'unknown source'}) is not in the run's store.",
                hint="Media are dropped when their prompt is done; keep nothing of it for later prompts.",
            ) from error
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        return b'"' + base64.b64encode(file.getbuffer()) + b'"'
