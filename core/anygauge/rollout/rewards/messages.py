"""Messages between the driver and a scoring process.

The driver pickles what it sends. Replies come from a process that runs anybody's code: each is a line of JSON
of a checked form, and the driver unpickles nothing.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from anygauge.rollout.rewards.call import Item, Outcome
from anygauge.rollout.rewards.resolve import Origin

__all__ = [
    "LONGEST_REPLY",
    "STACKS_MARK",
    "STACKS_SIGNAL",
    "UNHEARD",
    "CallSpec",
    "Chunk",
    "Ready",
    "Results",
    "Setup",
    "decode_reply",
    "encode_reply",
]

STACKS_SIGNAL = signal.SIGUSR1
"""Lets a process write what it is doing to its log."""
STACKS_MARK = b"most recent call first"
"""In the first line of each stack that is written."""
UNHEARD = 113
"""Exit status of a process that cannot send any more: a function has closed its connection."""
LONGEST_REPLY = 256 << 20
"""Bytes of one message of a process."""


@dataclass(frozen=True, slots=True)
class CallSpec:
    """A call as it is sent to a process."""

    origin: Origin
    fields: dict[str, Any]
    """Fields of :class:`~anygauge.rollout.rewards.call.Call`, except the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings that a scoring process gets before its first sample."""

    calls: Sequence[CallSpec]
    memory_bytes: int
    timeout_s: float
    concurrency: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Items for one of the calls."""

    call: int
    columns: Sequence[Sequence[Any]]
    """Columns of the fields of :class:`~anygauge.rollout.rewards.call.Item`, which pickle faster than
    items."""

    @classmethod
    def of(cls, call: int, items: Sequence[Item]) -> Self:
        """Return items as they are sent."""
        return cls(call, tuple(zip(*items, strict=True)))

    def items(self) -> list[Item]:
        """Return the items."""
        return list(map(Item, *self.columns))


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer to a setup."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """Some of the outcomes of a chunk, by index of the item."""

    outcomes: Sequence[tuple[int, Sequence[Outcome]]]
    spent: bool = False
    """The process has run out of memory and ends."""


def encode_reply(reply: Ready | Results) -> bytes:
    """Return a message of a process as a line."""
    if isinstance(reply, Ready):
        return json.dumps({"problem": reply.problem}).encode() + b"\n"
    return json.dumps({"outcomes": reply.outcomes, "spent": reply.spent}).encode() + b"\n"


def decode_reply(line: bytes) -> Ready | Results:
    """Return the message of a line.

    :raises ValueError: It holds none.
    """
    try:
        reply = json.loads(line)
    except RecursionError:
        raise ValueError("JSON of too many levels") from None
    match reply:
        case {"problem": (None | str()) as problem}:
            return Ready(problem)
        case {"outcomes": list() as outcomes, "spent": bool() as spent}:
            return Results([_of_item(each) for each in outcomes], spent)
    raise ValueError("JSON of another form")


def _of_item(entry: Any) -> tuple[int, Sequence[Outcome]]:
    match entry:
        case [int() as index, list() as outcomes]:
            return index, [_outcome(each) for each in outcomes]
    raise ValueError("JSON of another form")


def _outcome(pair: Any) -> Outcome:
    match pair:
        case [value, (None | str()) as error]:
            return value, error
    raise ValueError("JSON of another form")
