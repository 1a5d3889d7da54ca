"""Media for tests: a store that is a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anygauge_hooks.media import Content

__all__ = ["DictStore"]


class DictStore:
    """A :class:`~anygauge_hooks.media.MediaStore` of one process."""

    def __init__(self, contents: Mapping[str, Content] | None = None) -> None:
        self._contents = dict(contents or {})

    def put(self, key: str, content: Content) -> None:
        """Keep a content."""
        self._contents.setdefault(key, content)

    def has(self, key: str) -> bool:
        """Return whether it is there."""
        return key in self._contents

    def get(self, key: str) -> Content:
        """Return a content."""
        return self._contents[key]

    def drop(self, keys: Iterable[str]) -> None:
        """Forget contents."""
        for key in keys:
            self._contents.pop(key, None)

    def bytes(self) -> int:
        """Return how many bytes there are."""
        return sum(content.data.nbytes for content in self._contents.values())

    def close(self) -> None:
        """Do nothing."""
