"""Role weights: several roles of one architecture swap their weights in the actor's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from anygauge_hooks.errors import UnknownNameError

__all__ = ["ACTOR", "RoleWeights"]

ACTOR = "actor"


class RoleWeights:
    """Host copies of the weights of other roles, and the way to use them for a while.

    :param parameters: The actor's, in the order of the copies.
    :param synchronize: Completes the actor's weights on every rank; a collective.
    :param check: Raises if ranks hold different weights of a role; a collective.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        synchronize: Callable[[], None],
        check: Callable[[str], None],
    ) -> None:
        self._parameters = parameters
        self._synchronize = synchronize
        self._check = check
        self._kept: dict[str, list[Tensor]] = {}

    def keep(self, role: str, load: Callable[[], object]) -> None:
        """Store the weights that ``load`` writes as those of a role. A collective.

        :raises RankMismatchError: Ranks were given different ones.
        """
        with self._restored():
            load()
            self._check(role)
            self._kept[role] = self._copies()

    @contextmanager
    def use(self, role: str) -> Iterator[None]:
        """Hold a role's weights in the parameters.

        :raises UnknownNameError: None are kept for the role.
        """
        if role == ACTOR:
            yield
            return
        if role not in self._kept:
            raise UnknownNameError(
                f"No weights are kept for role {role!r}; kept: {', '.join(sorted(self._kept)) or 'none'}.",
                hint="Call load_role first.",
            )
        with self._restored():
            self._write(self._kept[role])
            yield

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Put the actor's weights back at the end, whatever happens."""
        # Without it the copy would hold what other ranks have already replaced.
        self._synchronize()
        copies = self._copies()
        try:
            yield
        finally:
            self._write(copies)

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    def _write(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.data.copy_(weight)
