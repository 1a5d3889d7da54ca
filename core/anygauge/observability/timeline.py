"""Timeline of a run: what each of its processes did when, as a Chrome trace that grows with the run.

The format is the JSON array of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
with complete events (``"ph": "X"``). Perfetto and ``chrome://tracing`` open it, also while the run goes on.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from anygauge.observability.phases import PhaseTime, Row
from anygauge.strict_json import parse_json

__all__ = ["TIMELINE_FILE", "Timeline", "read_events"]

_log = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.json"
"""Name of the file in the run directory."""
KINDS: Mapping[str, tuple[int, str]] = {
    "driver": (1, "driver"),
    "actor": (2, "training workers"),
    "rollout": (3, "rollout workers"),
    "engine": (4, "servers"),
}
"""Number and name of the group of rows, by kind of row."""
END = b"\n]\n"
LARGEST_EVENT = 4096
"""Bytes."""


class Timeline:
    """Appends phases to a trace. The file is valid JSON after each call; a kill costs one step at most.

    What cannot be written is left out with one warning: a run does not depend on it.

    :param path: Path of a file that is made, or continued.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: set[Row] = set()
        self._stream: IO[bytes] | None = None
        try:
            self._stream = _opened(path)
        except OSError as error:
            self._give_up(error)

    def add(self, row: Row, phases: Iterable[PhaseTime]) -> None:
        """Append the phases of a process or a server."""
        events = [_event(row, each) for each in phases]
        if not events or self._stream is None:
            return
        if row not in self._rows:
            self._rows.add(row)
            events = [*_names(row), *events]
        try:
            self._append(self._stream, events)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _append(self, stream: IO[bytes], events: Iterable[Mapping[str, Any]]) -> None:
        """Put events in the place of the closing bracket, with a new one, in one write."""
        end = stream.seek(-len(END), os.SEEK_END)
        separator = b",\n" if end > 1 else b"\n"
        lines = [json.dumps(event, separators=(",", ":")).encode() for event in events]
        stream.write(separator + b",\n".join(lines) + END)
        stream.flush()

    def _give_up(self, error: OSError) -> None:
        _log.warning("%s is not written any more: %s", self._path, error)
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._stream = None


def _opened(path: Path) -> IO[bytes]:
    """Open a file whose end is that of a trace; half an event, after a kill, is cut off."""
    with path.open("ab"):
        pass
    stream = path.open("r+b")
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - len(END)))
    if stream.read() != END:
        end = _end_of_events(stream)
        stream.seek(end)
        stream.truncate()
        stream.write(END if end else b"[" + END)
        stream.flush()
    return stream


def _end_of_events(stream: IO[bytes]) -> int:
    """Return where the last whole line ends; a loss of power may leave any number of zeros after it."""
    size = stream.seek(0, os.SEEK_END)
    first, length = size, LARGEST_EVENT
    while first:
        first = stream.seek(max(0, size - length))
        if whole := _whole(stream.read()):
            return first + whole
        length *= 4
    return 0


def _whole(tail: bytes) -> int:
    """Return how many bytes of the end of a file are whole lines, without the last comma."""
    while tail:
        line = tail[tail.rfind(b"\n") + 1 :].rstrip(b",")
        if line == b"[" or _is_event(line):
            return len(tail.rstrip(b","))
        tail = tail[: max(0, tail.rfind(b"\n"))]
    return 0


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _event(row: Row, phase: PhaseTime) -> dict[str, Any]:
    return {
        "name": phase.name,
        "ph": "X",
        "pid": KINDS[row.kind][0],
        "tid": row.rank,
        "ts": round(phase.start * 1e6),
        "dur": round(phase.seconds * 1e6),
    }


def _names(row: Row) -> Iterator[dict[str, Any]]:
    """Yield what names a row and its group in a viewer."""
    pid, group = KINDS[row.kind]
    for name, value in (("process_name", {"name": group}), ("process_sort_index", {"sort_index": pid})):
        yield {"name": name, "ph": "M", "pid": pid, "tid": row.rank, "args": value}
    yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": row.rank, "args": {"name": row.label}}


def read_events(path: Path, *, most_bytes: int) -> list[tuple[Row, PhaseTime]]:
    """Return the phases of a timeline, or those at its end.

    :param most_bytes: Bytes that are read. Lines that are no event are left out.
    :raises OSError: There is no such file.
    """
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - most_bytes))
        lines = stream.read().split(b"\n")
    kinds: dict[Any, Any] = {number: kind for kind, (number, _) in KINDS.items()}
    events = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError, OverflowError):
            event = parse_json(line.rstrip(b","), strict=False)
            start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            if event["ph"] == "X" and math.isfinite(start) and math.isfinite(seconds):
                time = PhaseTime(str(event["name"]), start, max(0.0, seconds))
                events.append((Row(kinds[event["pid"]], int(event["tid"])), time))
    return events
