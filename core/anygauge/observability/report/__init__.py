"""The run report: one HTML page that shows a run, also while it is running."""

from __future__ import annotations

from pathlib import Path

from anygauge.disk import replace_file
from anygauge_hooks.errors import CheckpointError

__all__ = ["REPORT_FILE", "write_report"]

REPORT_FILE = "report.html"
"""Name of the page in the run directory."""


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the report of a run and return its path.

    :param directory: Directory of a run that has ended, goes on or has failed.
    :param out: The page; ``None`` takes ``report.html`` in the directory.
    :raises CheckpointError: It is not a run directory, or the page cannot be written.
    """
    from anygauge.observability.report.page import render_page
    from anygauge.observability.report.run_files import read_run

    page = render_page(read_run(directory))
    target = directory / REPORT_FILE if out is None else out
    try:
        replace_file(target, page)
    except OSError as error:
        raise CheckpointError(
            f"The report cannot be written to {target}: {error}.",
            hint="Name a file in a directory that exists and that you may write to: --out FILE.",
        ) from error
    return target
