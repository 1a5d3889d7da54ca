"""Images in agents' requests: put into the run's media store, with placeholders in the prompt."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anygauge.data.media.problems import check_number
from anygauge.rollout.gateway.messages import Chat, Message
from anygauge.rollout.gateway.refusals import Refusal, bad_request
from anygauge.rollout.gateway.rendering import Renderer
from anygauge_hooks.errors import MediaError, RolloutError
from anygauge_hooks.media import Media

__all__ = ["MOST_IMAGES", "SLOT", "Images", "Look", "Shown", "image_in"]

SLOT = f"image{secrets.token_hex(16)}"
"""Stands for an image in the text of a message until it is known how the model marks one."""
MOST_IMAGES = 1000
"""Different images of a session: each stays in the run's store until the session ends."""
_TAKEN = ("data:", "http://", "https://")
Look = Callable[[Sequence[Mapping[str, Any]]], Awaitable[tuple[tuple[int, ...], tuple[Media, ...]]]]
"""Function from messages with media to tokens and their media; see :meth:`Rollout.look`."""


class Shown(NamedTuple):
    """Tokens with what is shown among them."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()

    def then(self, other: Shown) -> Shown:
        """Return both, one after the other."""
        moved = (medium.moved(len(self.tokens)) for medium in other.media)
        return Shown(self.tokens + other.tokens, (*self.media, *moved))


def image_in(block: Any, where: str) -> str | None:
    """Return the address of the image that a block is, or ``None`` if it is none.

    :raises Refusal: It is one that cannot be taken: an agent may not read files of this host.
    """
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind not in ("image_url", "input_image", "image"):
        return None
    source = block.get("source") if kind == "image" else block.get("image_url")
    address = source
    if isinstance(source, Mapping):
        address = source.get("url")
        if source.get("type") == "base64":
            address = f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"
    if not isinstance(address, str) or not address.startswith(_TAKEN):
        raise bad_request(f"{where} has no image as data: or as an address.", where)
    return address


class Images:
    """The images of one session.

    :param look: Takes an image into the run's store; ``None`` of a model that reads text alone.
    :param reserved: Tokens that hold the places of media, which no text may have.
    :param most: Images of one conversation; ``None`` for any number.
    """

    def __init__(
        self, renderer: Renderer, look: Look | None, reserved: Collection[int], most: int | None = None
    ) -> None:
        self._renderer = renderer
        self._most = most
        self._look = look
        self._reserved = frozenset(reserved)
        self._known: dict[str, tuple[str, Media]] = {}
        """Marks by image: the model's mark for it, and the media of the placeholder in that mark."""

    @property
    def taken(self) -> bool:
        """Whether the model takes images."""
        return self._look is not None

    async def marked(self, chat: Chat) -> Chat:
        """Return a chat whose images were taken, and have their marks in the text.

        :raises Refusal: One of them cannot be shown, or there are too many.
        """
        try:
            check_number(sum(len(message.images) for message in chat.messages), self._most)
        except MediaError as error:
            raise bad_request(str(error), "messages") from error
        return chat._replace(messages=tuple([await self._marked(message) for message in chat.messages]))

    async def _marked(self, message: Message) -> Message:
        marks = [(await self._taken(image))[0] for image in message.images]
        pieces = zip(message.content.split(SLOT), [*marks, ""], strict=True)
        return message._replace(content="".join(piece + mark for piece, mark in pieces))

    async def _taken(self, image: str) -> tuple[str, Media]:
        name = _digest(image)
        if name not in self._known:
            if self._look is None:
                raise bad_request("Only text can be given to this model.", "messages")
            if len(self._known) >= MOST_IMAGES:
                text = f"This session has shown {MOST_IMAGES} different images, and takes no more."
                raise Refusal(429, text, parameter="messages", code="too_many_images")
            parts = [{"type": "image", "image": image}]
            try:
                tokens, (medium,) = await self._look([{"role": "user", "content": parts}])
            except (MediaError, RolloutError) as error:
                raise bad_request(str(error), "messages") from error
            [(start, count)] = medium.spans
            single = tokens[: start + 1] + tokens[start + count :]
            self._known[name] = self._renderer.decode(single), medium
        return self._known[name]

    def placed(self, tokens: Iterable[int], messages: Sequence[Message]) -> Shown:
        """Return tokens with room for the images of messages, which are marked among them.

        :raises Refusal: There are more marks than images, or fewer.
        """
        waiting = [image for message in messages for image in message.images]
        made: list[int] = []
        media: list[Media] = []
        for token in tokens:
            count = 1
            if token in self._reserved:
                if len(media) == len(waiting):
                    raise self._differing(messages)
                _, medium = self._known[_digest(waiting[len(media)])]
                count = medium.num_tokens
                media.append(medium._replace(spans=((len(made), count),)))
            made += [token] * count
        if len(media) < len(waiting):
            raise self._differing(messages)
        return Shown(tuple(made), tuple(media))

    def single(self, shown: Shown) -> tuple[int, ...]:
        """Return tokens with one placeholder for each image, as the template writes them."""
        ids: list[int] = []
        end = 0
        for medium in shown.media:
            [(start, count)] = medium.spans
            ids += shown.tokens[end : start + 1]
            end = start + count
        return (*ids, *shown.tokens[end:])

    def _differing(self, messages: Sequence[Message]) -> Exception:
        count = sum(len(message.images) for message in messages)
        return bad_request(
            f"The chat template marks another number of images than the {count} that the messages have; is "
            "such a mark part of their text?",
            "messages",
        )


def _digest(image: str) -> str:
    return hashlib.blake2b(image.encode(), digest_size=16).hexdigest()
