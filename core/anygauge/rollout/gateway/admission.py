"""Admission control: limits on the generations of a gateway and on the request bytes of a session."""

from __future__ import annotations

from anygauge.rollout.gateway.refusals import Refusal

__all__ = ["Admission"]

_RETRY_AFTER_S = 1.0


class Admission:
    """Counts requests in flight, and refuses those above a limit.

    :param most: Under way at once; ``None`` for any number.
    :param unit: Name of the requests in errors, in the plural.
    """

    def __init__(self, most: int | None, unit: str) -> None:
        self._most = most
        self._unit = unit
        self._under_way = 0

    def admit(self, count: int) -> None:
        """Count what begins.

        :raises Refusal: It is too much.
        """
        if self._most is not None and self._under_way + count > self._most:
            raise Refusal(
                429,
                f"{self._under_way} {self._unit} are under way; at most {self._most} may be.",
                code="rate_limit_exceeded",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._under_way += count

    def release(self, count: int) -> None:
        """Count what has ended."""
        self._under_way -= count
