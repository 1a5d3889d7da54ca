"""Show warnings of a run on standard error, for the command line and for the Python API."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from anygauge.observability.control_characters import VisibleFormatter

__all__ = ["terminal_handler", "terminal_warnings"]


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, which the live display of a run replaces by its own."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def terminal_handler() -> logging.Handler:
    """Return the handler that shows warnings on standard error; the log of a run has more."""
    handler = _StandardError()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(VisibleFormatter("%(levelname)s: %(message)s"))
    return handler


@contextmanager
def terminal_warnings() -> Iterator[None]:
    """Show warnings on standard error while a block runs, unless the program has configured logging.

    Python itself shows the warnings of a program without handlers, but no longer once a run adds the one of
    its log file. The handler is on the root logger because backends log beside the core.
    """
    root = logging.getLogger()
    if root.handlers or logging.getLogger("anygauge").handlers:
        yield
        return
    handler = terminal_handler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
