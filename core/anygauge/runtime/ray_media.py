"""Media in Ray's object store, for a run on several hosts: one copy on each host that requests it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from typing import Any

from anygauge_hooks.media import Content

__all__ = ["RayStore", "ray_name"]

NAMESPACE = "anygauge"


def ray_name(link: object) -> str:
    """Return the name of the actor that knows where the contents of a run are.

    :param link: The path that a store of files would have.
    """
    return f"media-{hashlib.blake2b(str(link).encode(), digest_size=8).hexdigest()}"


class Directory:
    """Map from keys to references: the actor that every process of the run calls."""

    def __init__(self) -> None:
        self._known: dict[str, list[Any]] = {}

    def put(self, key: str, boxed: list[Any], size: int) -> None:
        """Keep a reference, in a list, or Ray would fetch what it refers to."""
        self._known.setdefault(key, [boxed[0], size])

    def find(self, key: str) -> list[Any] | None:
        """Return a reference in a list."""
        return self._known[key][:1] if key in self._known else None

    def drop(self, keys: list[str]) -> None:
        """Drop references; Ray frees unreferenced objects."""
        for key in keys:
            self._known.pop(key, None)

    def bytes(self) -> int:
        """Return how many bytes of contents there are."""
        return sum(size for _, size in self._known.values())


class RayStore:
    """Contents by key. Ray must be connected when the first one is asked for.

    :param name: From :func:`ray_name`.
    :param owns: Whether the actor is made by this store, and ended with it.
    """

    def __init__(self, name: str, *, owns: bool = False) -> None:
        self._name = name
        self._owns = owns
        # The actor ends with the handle that made it: of two threads only one may.
        self._making = threading.Lock()
        self._actor: Any = None

    def put(self, key: str, content: Content) -> None:
        """Keep a content. One that is there already stays."""
        import ray

        if not self.has(key):
            boxed = [ray.put(tuple(content))]
            ray.get(self._directory.put.remote(key, boxed, content.data.nbytes))

    def has(self, key: str) -> bool:
        """Return whether the content is there."""
        return self._find(key) is not None

    def get(self, key: str) -> Content:
        """Return a content, without a copy on a host that has it.

        :raises KeyError: It is not there.
        """
        import ray

        boxed = self._find(key)
        if boxed is None:
            raise KeyError(key)
        return Content(*ray.get(boxed[0]))

    def drop(self, keys: Iterable[str]) -> None:
        """Forget contents; arrays in use stay valid."""
        import ray

        ray.get(self._directory.drop.remote(list(keys)))

    def bytes(self) -> int:
        """Return how many bytes of contents there are."""
        import ray

        return int(ray.get(self._directory.bytes.remote()))

    def close(self) -> None:
        """End the actor, if it is this store's; its contents go with it."""
        import ray

        if self._owns and self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)
        self._actor = None

    def _find(self, key: str) -> Any:
        import ray

        return ray.get(self._directory.find.remote(key))

    @property
    def _directory(self) -> Any:
        import ray

        with self._making:
            if self._actor is None and self._owns:
                kind = ray.remote(Directory).options(name=self._name, namespace=NAMESPACE, num_cpus=0)
                self._actor = kind.remote()
            elif self._actor is None:
                self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
            return self._actor
