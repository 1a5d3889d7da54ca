"""Roles of a model with adapters: reference and teacher compute without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from anygauge.engines.fsdp.lora import Adapters
from anygauge.engines.fsdp.weights import LocalShard
from anygauge.engines.roles import ACTOR, RoleWeights

__all__ = ["BaseRoles"]


class BaseRoles:
    """Role weights of a model with adapters: all roles but the actor compute without them.

    A role whose weights are those that the model was built from needs a copy of the trained ones alone.

    :param base: Directory of these.
    :param shards: All but adapters.
    :param load: Reads the weights of a directory into the model. A collective.
    :param changed: Called when other weights are in the place of the actor's, and when these are back.
    """

    def __init__(
        self,
        adapters: Adapters,
        base: Path,
        shards: Sequence[LocalShard],
        load: Callable[[Path], object],
        changed: Callable[[], object],
    ) -> None:
        self._changed = changed
        self._adapters = adapters
        self._base = base
        self._load = load
        self._all = _role_weights(shards)
        self._trained = _role_weights([shard for shard in shards if shard.tensor.requires_grad])
        self._has_trained = any(shard.tensor.requires_grad for shard in shards)
        self._of_base: set[str] = set()

    def keep(self, role: str, path: Path) -> None:
        """Store the weights of a directory as those of a role. A collective."""
        if path.resolve() != self._base.resolve():
            self._of_base.discard(role)
            self._all.keep(role, lambda: self._load(path))
            return
        self._of_base.add(role)
        self._trained.keep(role, lambda: self._load(path) if self._has_trained else None)

    @contextmanager
    def use(self, role: str) -> Iterator[None]:
        """Let the model compute as a role.

        :raises UnknownNameError: No weights are kept for it.
        """
        if role == ACTOR:
            yield
            return
        weights = self._trained if role in self._of_base else self._all
        try:
            with self._adapters.off(), weights.use(role):
                self._changed()
                yield
        finally:
            self._changed()


def _role_weights(shards: Sequence[LocalShard]) -> RoleWeights:
    # Each rank's shards are its own, and were checked when they were read.
    return RoleWeights([shard.local for shard in shards], lambda: None, lambda role: None)
