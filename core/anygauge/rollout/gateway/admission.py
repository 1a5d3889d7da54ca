"""How many generations a gateway has under way."""

from __future__ import annotations

from anygauge.rollout.gateway.refusals import Refusal

__all__ = ["Admission"]

_RETRY_AFTER_S = 1.0


class Admission:
    """Counts generations, and refuses those that are too many.

    :param most: Under way at once; ``None`` for any number.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._under_way = 0

    def admit(self, count: int) -> None:
        """Count generations that begin.

        :raises Refusal: There are too many.
        """
        if self._most is not None and self._under_way + count > self._most:
            raise Refusal(
                429,
                f"{self._under_way} generations are under way; at most {self._most} may be.",
                code="rate_limit_exceeded",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._under_way += count

    def release(self, count: int) -> None:
        """Count generations that have ended."""
        self._under_way -= count
