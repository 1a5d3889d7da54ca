"""Admission queue: requests that wait for an engine with room, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from anygauge.serving.load_balancer import LoadBalancer, Ticket
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rollout import GenerateRequest

__all__ = ["AdmissionQueue"]


@dataclass(eq=False, slots=True)
class _Waiting:
    request: GenerateRequest
    avoid: Collection[str]
    ticket: asyncio.Future[Ticket | None]
    """``None`` where the request was aborted."""


class AdmissionQueue:
    """Gives requests their places in engines. A request waits as long as it takes while an engine serves.

    :param balancer: Says where there is room.
    :param outage_timeout_s: Longest wait while no engine serves.
    :param describe: Says how the engines are, for the error.
    """

    def __init__(self, balancer: LoadBalancer, outage_timeout_s: float, describe: Callable[[], str]) -> None:
        self._balancer, self._timeout_s, self._describe = balancer, outage_timeout_s, describe
        self._queue: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._outage = True

    @property
    def outage(self) -> bool:
        """Whether no engine serves."""
        return self._outage

    def __len__(self) -> int:
        return len(self._queue)

    async def enter(self, request: GenerateRequest, avoid: Collection[str]) -> Ticket | None:
        """Return a place for a request, or ``None`` if it was aborted while it waited.

        :param avoid: Engines that get the request only if no other has room.
        :raises DeadlineError: No engine has served for too long.
        """
        ticket = None if self._queue else self._take(request, avoid)
        if ticket is not None:
            return ticket
        waiting = _Waiting(request, avoid, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._set_timer()
        try:
            return await waiting.ticket
        except asyncio.CancelledError:
            if waiting.ticket.done() and not waiting.ticket.cancelled():
                self._return(waiting.ticket)
            raise

    def _return(self, place: asyncio.Future[Ticket | None]) -> None:
        if place.exception() is None and (ticket := place.result()) is not None:
            self._balancer.release(ticket)
            self.serve()

    def serve(self) -> None:
        """Admit waiting requests while engines have room."""
        while self._queue:
            first = self._queue[0]
            if not first.ticket.done():
                ticket = self._take(first.request, first.avoid)
                if ticket is None:
                    return
                first.ticket.set_result(ticket)
            self._queue.popleft()

    def _take(self, request: GenerateRequest, avoid: Collection[str]) -> Ticket | None:
        return self._balancer.take(
            len(request.tokens),
            request.params.max_new_tokens,
            request.session,
            avoid,
            group=request.group,
        )

    def abort(self) -> None:
        """Wake all waiting requests without admitting them."""
        for each in self._drain():
            each.ticket.set_result(None)

    def close(self) -> None:
        """Fail all waiting requests."""
        if self._timer is not None:
            self._timer.cancel()
        for each in self._drain():
            each.ticket.set_exception(
                RolloutError(
                    f"The engine pool was closed while request {each.request.label} waited for an engine."
                )
            )

    def set_outage(self, outage: bool) -> None:
        """Say whether no engine serves."""
        if outage != self._outage:
            self._outage = outage
            self._set_timer()

    def _set_timer(self) -> None:
        """Count the time of an outage from when it began, or from when somebody first waits in it."""
        if not self._outage and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif self._outage and self._timer is None and self._queue:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._fail)

    def _fail(self) -> None:
        self._timer = None
        for each in self._drain():
            each.ticket.set_exception(self._late(each.request))

    def _drain(self) -> list[_Waiting]:
        waiting, self._queue = self._queue, deque()
        return [each for each in waiting if not each.ticket.done()]

    def _late(self, request: GenerateRequest) -> DeadlineError:
        return DeadlineError(
            f"No engine has served for {self._timeout_s:.4g} s; request {request.label} waited for one. "
            f"{self._describe()}",
            hint="See the engines' logs; raise rollout.client.outage_timeout_s if they need longer.",
        )
