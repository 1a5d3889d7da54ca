"""Observers that record how a run goes and write its report. None of them can fail the run."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from anygauge.observability.report import write_report
from anygauge.observability.report.run_record import RECORD_FILE, begin_part, end_part
from anygauge.observability.samples import SampleRecorder
from anygauge_hooks import hookimpl
from anygauge_hooks.types import RunInfo

_log = logging.getLogger(__name__)
_begun: dict[str, tuple[int, int] | None] = {}
"""Directories of runs between ``before_train`` and ``after_train``, and which ones these are on disk."""
_errors: dict[str, BaseException] = {}
"""Errors that ended a run, by run directory, until ``after_train``."""

_due: dict[str, float] = {}
"""When the report of a run is written next, in seconds of the monotonic clock."""
EVERY_S = 30.0
"""Least time between two reports of a running run."""
SHARE = 0.02
"""Largest share of the time that writing them may take."""

after_rollout = SampleRecorder().after_rollout


@hookimpl
def before_train(run: RunInfo) -> None:
    """Record when the run began, and which process it is."""
    _begun[run.directory] = _identity(run.directory)
    _due[run.directory] = time.monotonic() + EVERY_S
    try:
        begin_part(run)
    except OSError as error:
        _log.warning("%s of %s cannot be written: %s", RECORD_FILE, run.directory, error)


@hookimpl
def after_train_step(run: RunInfo, metrics: Mapping[str, float]) -> None:
    """Write the report of the run so far, now and then: an open page reloads itself."""
    began = time.monotonic()
    is_due = run.config.run.report and began >= _due.get(run.directory, math.inf)
    if is_due and _begun.get(run.directory) == _identity(run.directory):
        with _warned(Path(run.directory)):
            write_report(Path(run.directory))
        ended = time.monotonic()
        _due[run.directory] = ended + max(EVERY_S, (ended - began) / SHARE)


@hookimpl
def on_error(run: RunInfo, error: BaseException) -> None:
    """Keep the error for the record."""
    _errors[run.directory] = error


@hookimpl(trylast=True)
def after_train(run: RunInfo) -> None:
    """Record how the run ended, and write the report if it is asked for.

    A resume that fails before its first step leaves the directory as it was, and so does every run a
    directory that has taken the place of its own.
    """
    _due.pop(run.directory, None)
    directory, error = Path(run.directory), _errors.pop(run.directory, None)
    if run.directory not in _begun and (directory / RECORD_FILE).exists():
        return
    if _begun.pop(run.directory, identity := _identity(run.directory)) != identity:
        _log.warning("%s is not where the run began: its end is not recorded there", directory)
        return
    with _warned(directory):
        end_part(run, error)
        if run.config.run.report:
            write_report(directory)


@contextmanager
def _warned(directory: Path) -> Iterator[None]:
    """Go on where the report cannot be written."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 - foreign code: jinja2, and what plugins wrote
        _log.warning("the report of %s was not written: %r", directory, problem)


def _identity(directory: str) -> tuple[int, int] | None:
    """Return device and inode of a directory, or ``None`` if it is not there."""
    with suppress(OSError):
        info = os.stat(directory)
        return info.st_dev, info.st_ino
    return None
