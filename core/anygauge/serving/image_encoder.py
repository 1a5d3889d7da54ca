"""Media of requests as text, encoded once for all servers.

The server gets each image as the run's own processor has made it, already of its final size, so that nothing
is left for the server to resize and both sides see the same pixels. Contents are the arrays that the trainer
has: pixels of all frames, or features of sound.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.errors import RolloutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anygauge_hooks.media import Media, MediaStore

__all__ = ["ImageEncoder"]

_Name = tuple[str, bool]
"""Key of a medium, and whether its content is wanted."""
MAX_BYTES = 512 * 2**20
"""Most bytes of encoded media that are cached for later requests."""


class ImageEncoder:
    """Encoded media, made once for the many requests that show them. Belongs to one event loop.

    :param store: Where the media are.
    :param max_bytes: Most bytes of encoded media that are kept.
    """

    def __init__(self, store: MediaStore, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Name, asyncio.Future[bytes]] = OrderedDict()
        self._bytes = 0

    async def encoded(self, media: Sequence[Media], *, contents: bool = False) -> list[bytes]:
        """Return each medium as a JSON string; see :class:`anygauge_hooks.serving.ImageEncoder`."""
        texts = await asyncio.gather(*(self._one(medium, contents) for medium in media))
        self._forget_oldest()
        return texts

    async def _one(self, medium: Media, contents: bool) -> bytes:
        name = medium.key, contents
        if (making := self._kept.get(name)) is None:
            making = asyncio.ensure_future(asyncio.to_thread(self._encode, medium, contents))
            self._kept[name] = making
            making.add_done_callback(lambda done: self._count(name, done))
        else:
            self._kept.move_to_end(name)
        # a request that is cancelled leaves the others their medium
        return await asyncio.shield(making)

    def _count(self, key: _Name, done: asyncio.Future[bytes]) -> None:
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

    def _encode(self, medium: Media, contents: bool) -> bytes:
        try:
            data = self._store.get(medium.key).data
        except KeyError as error:
            name = f"{medium.kind.capitalize()} {medium.key} ({medium.source or 'unknown source'})"
            raise RolloutError(
                f"{name} is not in the run's store.",
                hint="Media are dropped when their prompt is done; keep nothing of it for later prompts.",
            ) from error
        file = io.BytesIO()
        if contents:
            np.save(file, data, allow_pickle=False)
        else:
            _save_png(data, file)
        return b'"' + base64.b64encode(file.getbuffer()) + b'"'


def _save_png(pixels: NDArray[Any], file: io.BytesIO) -> None:
    from PIL import Image

    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
