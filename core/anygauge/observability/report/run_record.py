"""Run record ``run.json``: start, end and outcome of each part of a run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anygauge.disk import read_json, replace_file
from anygauge_hooks.types import RunInfo

__all__ = ["RECORD_FILE", "begin_part", "end_part", "read_record"]

RECORD_FILE = "run.json"
"""Name of the file in the run directory."""
_TEXTS = ("name", "backend", "started", "ended", "host", "outcome", "error")
_NUMBERS = ("total_steps", "pid", "from_step", "step")


def begin_part(run: RunInfo) -> None:
    """Record that a run starts or resumes in this process."""
    with _changed(run) as record:
        record["parts"].append(_part(run))


def end_part(run: RunInfo, error: BaseException | None) -> None:
    """Record how this process ended its part of a run, also a first one that ended before it could begin.

    :param error: Error that ended it, or ``None`` for its last step.
    """
    outcome = "finished" if error is None else "failed" if isinstance(error, Exception) else "interrupted"
    end = {"ended": _now(), "step": run.step, "outcome": outcome, "error": _text(error)}
    with _changed(run) as record:
        if not record["parts"]:
            record["parts"].append(_part(run))
        record["parts"][-1] |= end


def _part(run: RunInfo) -> dict[str, Any]:
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    return {"started": _now(), **here, "from_step": run.step, "ended": None, "outcome": None, "error": None}


def read_record(directory: Path) -> Mapping[str, Any] | None:
    """Return the record of a run, or ``None`` where there is none that can be read.

    A value of another type than is written is left out.
    """
    try:
        record = read_json(directory / RECORD_FILE)
    except (OSError, ValueError):
        return None
    known = isinstance(record, dict) and isinstance(record.get("parts"), list)
    if not known or not all(isinstance(part, dict) for part in record["parts"]):
        return None
    return {**_as_written(record), "parts": [_as_written(part) for part in record["parts"]]}


def _as_written(table: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: value for key in _TEXTS if isinstance(value := table.get(key), str)}
    return texts | {key: value for key in _NUMBERS if type(value := table.get(key)) is int}


@contextmanager
def _changed(run: RunInfo) -> Iterator[dict[str, Any]]:
    """Yield the record, and write it back."""
    directory = Path(run.directory)
    record = {"parts": [], **(read_record(directory) or {})}
    record |= {"name": run.name, "backend": run.backend, "total_steps": run.total_steps}
    yield record
    replace_file(directory / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _text(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
