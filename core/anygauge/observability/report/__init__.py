"""The run report: one HTML page that shows a run, also while it is running, and one that compares runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from anygauge.disk import replace_file
from anygauge_hooks.errors import CheckpointError

__all__ = ["MOST_RUNS", "REPORT_FILE", "write_comparison", "write_report"]

REPORT_FILE = "report.html"
"""Name of the page in the run directory."""
MOST_RUNS = 8
"""Runs that one page compares: as many as there are colors."""
_TITLE_END = b" anygauge run report</title>"
"""End of the title in ``base.html``, by which an earlier report is recognized."""
_HEAD = 65_536
"""Bytes in which the title is looked for; the names of the runs come before its end."""


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the report of a run and return its path.

    :param directory: Directory of a run that has ended, goes on or has failed.
    :param out: The page; ``None`` takes ``report.html`` in the directory.
    :raises CheckpointError: It is not a run directory, the page cannot be written, or it would overwrite
        a file that is not a report.
    """
    from anygauge.observability.report.page import render_page
    from anygauge.observability.report.run_files import read_run

    page = render_page(read_run(directory), is_rewritten=out is None)
    return _write(page, directory / REPORT_FILE if out is None else out)


def write_comparison(directories: Sequence[Path], out: Path | None = None) -> Path:
    """Write the comparison of runs and return its path.

    :param directories: Directories of two runs or more.
    :param out: The page; ``None`` takes ``compare-A-B.html`` beside the first directory.
    :raises CheckpointError: One is no run directory, there are too many, the page cannot be written, or it
        would overwrite a file that is not a report.
    """
    from anygauge.observability.report.compare import render_comparison
    from anygauge.observability.report.run_files import read_run

    if len(directories) > MOST_RUNS:
        raise CheckpointError(
            f"{len(directories)} runs are too many for one page.", hint=f"Name {MOST_RUNS} at most."
        )
    places = [directory.resolve() for directory in directories]
    if twice := next((each for each in places if places.count(each) > 1), None):
        raise CheckpointError(f"{twice} is named twice.", hint="Name each run once.")
    names = "-".join(place.name for place in places)
    parent = directories[0].parent
    if parent.resolve() != places[0].parent:  # as for "." and for a symlink
        parent = places[0].parent
    target = parent / f"compare-{names[:200]}.html" if out is None else out
    return _write(render_comparison([read_run(each) for each in directories]), target)


def _write(page: str, target: Path) -> Path:
    try:
        is_file = target.is_file()
        if is_file and not _is_report(target):
            raise CheckpointError(
                f"The report is not written to {target}: the file exists and is not a report of anygauge.",
                hint="Choose another name with --out FILE, or remove that file.",
            )
        if is_file or not target.exists():
            replace_file(Path(os.path.realpath(target)), page)  # a symlink stays
        else:  # a FIFO or a device, which a renamed file would replace
            target.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(
            f"The report cannot be written to {target}: {error.strerror or error}.",
            hint="Name a file in a directory that exists and that you may write to: --out FILE.",
        ) from error
    return target


def _is_report(file: Path) -> bool:
    """Return whether a file is an earlier report, or empty, as those that ``mktemp`` makes."""
    with file.open("rb") as stream:
        head = stream.read(_HEAD)
    return not head or (head.startswith(b"<!doctype html>") and _TITLE_END in head)
