"""Errors of the Python API, as a person reads them in a notebook: without the frames of anygauge."""

from __future__ import annotations

import os
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType

from anygauge_hooks.errors import AnygaugeError

__all__ = ["short_errors"]

API = Path(__file__).parent
CORE = API.parent


class short_errors(ContextDecorator):
    """Leave of an error's traceback what its reader wrote, as the command line does.

    An error of anygauge tells in its text what went wrong: it keeps no frame and no cause. Of an error of a
    function of the caller the frames from that function on stay. With ``ANYGAUGE_DEBUG=1`` all is as it was.
    """

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Cut the traceback of the error, if there is one."""
        if error is None or os.environ.get("ANYGAUGE_DEBUG") == "1":
            return
        if isinstance(error, AnygaugeError | KeyboardInterrupt):
            error.__cause__ = error.__traceback__ = None
        elif theirs := _called_by_the_api(trace):
            error.__traceback__ = theirs


def _called_by_the_api(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames behind the last one of anygauge, if the API itself made the call."""
    last, behind = Path(), None
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(CORE):
            last, behind = path, trace.tb_next
        trace = trace.tb_next
    return behind if last.parent == API else None
