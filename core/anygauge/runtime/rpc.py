"""Messages between the driver and a worker, and how a remote failure is reported.

Requests and replies are bytes, pickled here and not by the transport. So a value arrives the same way under
every launcher: arrays are writable, and tensors are copied instead of moving through shared-memory files
(which ``multiprocessing`` would use for them, and which outlive a killed process).
"""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge_hooks.errors import AnygaugeError, DeadlineError, WorkerDiedError, WorkerFailedError

__all__ = [
    "Died",
    "MethodCall",
    "Raised",
    "Returned",
    "WorkerId",
    "capture",
    "deadline_error",
    "decode",
    "encode",
    "error_of",
]

LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|recvBytes|sendBytes|connectFullMesh"
    r"|socket (closed|error|timeout)|remote process exited",
    re.IGNORECASE,
)
"""How collectives report that another rank has gone."""
NO_STACK = (
    "  (no stack taken: still starting, on its way out, one of many; or stopped by a signal, or in a wait\n"
    "  that nothing interrupts, such as one for a disk, where a process cannot answer)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerId:
    """Which worker is meant, for people."""

    role: str
    rank: int
    pid: int = 0
    """0 while unknown."""
    host: str = "?"

    def __str__(self) -> str:
        return f"Rank {self.rank} ({self.role}, pid {self.pid or '?'}, {self.host})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCall:
    """A method to call in a worker process."""

    method: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any]
    lifecycle: bool = False
    """Whether it is a method of the process itself instead of the worker object inside."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A call that succeeded."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """A call that raised."""

    traceback: str
    """As Python prints it, cause chain included."""
    pickled: bytes | None = None
    """The exception, if it survives pickling."""
    code: str | None = None
    """Code of an :class:`AnygaugeError`."""
    lost_peer: bool = False
    """Whether the exception looks like the consequence of another rank's death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A worker process that ended before it replied."""

    how: str
    """As a clause: ``"was killed by SIGKILL"``."""
    log: str = ""
    """The last lines that it wrote."""


def encode(value: object) -> bytes:
    """Pickle a message."""
    return pickle.dumps(value, protocol=5)


def decode(message: bytes) -> Any:
    """Unpickle a message."""
    return pickle.loads(message)


def capture(error: BaseException, *, hidden_frames: int = 0) -> Raised:
    """Describe an exception so that it can leave the process.

    :param hidden_frames: Innermost-last frames at the start of the traceback that are this package's own.
    """
    frames = error.__traceback__
    for _ in range(hidden_frames):
        frames = frames.tb_next if frames is not None and frames.tb_next is not None else frames
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return Raised(
        traceback=text,
        pickled=_pickled_or_none(error),
        code=error.code if isinstance(error, AnygaugeError) else None,
        lost_peer=isinstance(error, ConnectionError) or LOST_PEER.search(str(error)) is not None,
    )


def _pickled_or_none(error: BaseException) -> bytes | None:
    try:
        message = encode(error)
        decode(message)  # many exceptions pickle but cannot be rebuilt
    except Exception:  # noqa: BLE001 - foreign code: an exception's own pickling
        return None
    return message


def error_of(
    failures: Mapping[int, Raised | Died],
    who: Mapping[int, WorkerId],
    advise: Callable[[Died], str | None] = lambda death: None,
) -> AnygaugeError:
    """Return the error with the root cause of a call's failures, with its ``__cause__`` set.

    A death comes before an exception, since a rank that dies makes the others raise; an exception that looks
    like a lost connection comes last.

    :param failures: Failure of each rank, in the order of arrival; not empty.
    :param who: Worker of each rank.
    :param advise: Returns what to do about a death, if anything is known.
    """
    ranks = sorted(failures, key=lambda rank: _order(failures[rank]))
    others = [f"{who[rank]} {_clause(failures[rank])}" for rank in ranks[1:]]
    hint = "\n  ".join(["Afterwards:", *others]) if others else None
    first = failures[ranks[0]]
    if isinstance(first, Died):
        return _died_error(who[ranks[0]], first, "\n  ".join(filter(None, [advise(first), hint])) or None)
    error = WorkerFailedError(f"{who[ranks[0]]} raised:\n{first.traceback}", hint=hint)
    error.__cause__ = _unpickled_or_none(first.pickled)
    return error


def _order(failure: Raised | Died) -> int:
    return 0 if isinstance(failure, Died) else 1 + failure.lost_peer


def _clause(failure: Raised | Died) -> str:
    if isinstance(failure, Died):
        return failure.how
    return f"raised {failure.traceback.splitlines()[-1].strip()}"


def _died_error(who: WorkerId, death: Died, hint: str | None) -> WorkerDiedError:
    log = f" The end of its log:\n{death.log}" if death.log else " Its log is empty."
    return WorkerDiedError(f"{who} {death.how}.{log}", hint=hint)


def _unpickled_or_none(pickled: bytes | None) -> BaseException | None:
    if pickled is None:
        return None
    try:
        error: BaseException = decode(pickled)
    except Exception:  # noqa: BLE001 - foreign code: an exception's own unpickling
        return None
    return error


def deadline_error(
    what: str,
    timeout_s: float,
    running: Sequence[WorkerId],
    stacks: Mapping[int, str],
    setting: str,
    logs: Mapping[int, Path],
) -> DeadlineError:
    """Return the error of a call that took too long.

    :param what: The method.
    :param running: The workers that have not answered.
    :param stacks: Stacks of the threads of each rank.
    :param setting: The config key that allows more time.
    :param logs: Log file of each rank.
    """
    lines = [f"{what!r} did not finish within {timeout_s:g} s on {len(running)} worker(s)."]
    same: dict[str, list[WorkerId]] = {}
    for who in running:
        same.setdefault(stacks.get(who.rank) or NO_STACK, []).append(who)
    for stack, workers in same.items():
        log = logs[workers[0].rank]
        if len(workers) == 1:
            lines += [f"{workers[0]}, whose log is {log}, is at:", stack]
        else:
            ranks = _ranges([who.rank for who in workers])
            lines += [f"Ranks {ranks} ({workers[0].role}), the first of whose logs is {log}, are at:", stack]
    return DeadlineError("\n".join(lines), hint=f"Raise {setting} if this needs longer.")


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, each)) for each in ranges)
