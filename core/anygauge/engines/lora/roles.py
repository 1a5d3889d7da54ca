"""Roles of a model with adapters: reference and teacher compute without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from anygauge.engines.lora.base import AdapterState
from anygauge.engines.roles import ACTOR, RoleWeights

__all__ = ["BaseRoles"]


class BaseRoles:
    """Role weights of a model that may have adapters: all roles but the actor compute without them.

    A role whose weights are those that the model was built from needs a copy of the trained ones alone.

    :param base: Directory of these.
    :param weights: All weights but adapters.
    :param trained: Those of them that are trained; ``None`` if adapters alone are.
    :param load: Reads the weights of a directory into the model. A collective.
    :param changed: Called when other weights are in the place of the actor's, and when these are back.
    """

    def __init__(
        self,
        adapters: AdapterState,
        base: Path,
        weights: RoleWeights,
        trained: RoleWeights | None,
        load: Callable[[Path], object],
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._adapters = adapters
        self._base = base
        self._all = weights
        self._trained = trained
        self._load = load
        self._changed = changed
        self._of_base: set[str] = set()

    def keep(self, role: str, path: Path) -> None:
        """Store the weights of a directory as those of a role. A collective."""
        if path.resolve() != self._base.resolve():
            self._of_base.discard(role)
            self._all.keep(role, lambda: self._load(path))
            return
        self._of_base.add(role)
        if self._trained is not None:
            self._trained.keep(role, lambda: self._load(path))

    @contextmanager
    def use(self, role: str) -> Iterator[None]:
        """Let the model compute as a role.

        :raises UnknownNameError: No weights are kept for it.
        """
        if role == ACTOR:
            yield
            return
        try:
            with self._adapters.off(), self._weights_of(role):
                self._changed()
                yield
        finally:
            self._changed()

    def _weights_of(self, role: str) -> AbstractContextManager[None]:
        if role not in self._of_base:
            return self._all.use(role)
        return nullcontext() if self._trained is None else self._trained.use(role)
