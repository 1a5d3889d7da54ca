"""Faults of a fake engine: after a number of events, or on command."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import dataclass

__all__ = ["KINDS", "Fault", "Faults", "parse_faults"]

KINDS = ("die", "hang", "refuse", "die_mid_update", "stall", "corrupt", "slow", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong, once.

    * ``die``: the process kills itself, as if the kernel had.
    * ``hang``: no request is answered any more and no token is made; connections are still accepted.
    * ``refuse``: the update of the weights is answered with 400, and changes nothing.
    * ``die_mid_update``: the process kills itself in the middle of an update.
    * ``stall``: the update is taken up only after ``argument`` seconds.
    * ``corrupt``: the update is made, and a bit of the first tensor that it changed is wrong.
    * ``slow``: all times are multiplied by ``argument``.
    * ``error``: the event is answered with status ``argument``.
    """

    kind: str
    event: str = "generate"
    """Event that is counted: ``generate``, ``update`` (a bucket, or a whole update from disk), ``begin``,
    ``end``."""
    count: int = 1
    """It happens at this event from now on, the first being 1."""
    argument: float = 0.0


def parse_faults(text: str) -> list[Fault]:
    """Return the faults of a text such as ``die@generate:20,slow@generate:5:3.0``.

    :raises ValueError: A kind is unknown.
    """
    return [_parse(part) for part in text.split(",") if part]


def _parse(text: str) -> Fault:
    kind, _, where = text.partition("@")
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no fault: {', '.join(KINDS)}")
    event, count, argument = [*where.split(":"), "", ""][:3] if where else ("generate", "", "")
    return Fault(kind=kind, event=event, count=int(count or 1), argument=float(argument or 0))


class Faults:
    """The faults that are still to come, and what has happened so far."""

    def __init__(self, faults: list[Fault]) -> None:
        self.seen: Counter[str] = Counter()
        self.hangs = False
        self._pending: list[tuple[int, Fault]] = []
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Let something go wrong later, or now if its count is 0."""
        if fault.count <= 0 and fault.kind in ("die", "hang"):
            self._happen(fault)
        else:
            self._pending.append((self.seen[fault.event] + fault.count, fault))

    def strike(self, event: str) -> Fault | None:
        """Count an event, and return the fault that its handler has to play, if there is one."""
        self.seen[event] += 1
        for entry in self._pending:
            at, fault = entry
            if fault.event == event and self.seen[event] >= at:
                self._pending.remove(entry)
                self._happen(fault)
                return fault
        return None

    def _happen(self, fault: Fault) -> None:
        if fault.kind == "die":
            die()
        self.hangs |= fault.kind == "hang"

    async def wait_if_hung(self) -> None:
        """Never return where the engine hangs."""
        while self.hangs:
            await asyncio.sleep(3600)


def die() -> None:
    """End this process at once, as a lack of memory would."""
    os.kill(os.getpid(), signal.SIGKILL)
