"""Errors of the Python API, as a person reads them in a notebook: without the frames of anygauge."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from anygauge_hooks.errors import AnygaugeError, WorkerFailedError

__all__ = ["short_errors"]

API = Path(__file__).parent
CORE = API.parent
Function = TypeVar("Function", bound=Callable[..., Any])


class short_errors(ContextDecorator):
    """Leave of an error's traceback what its reader wrote, as the command line does.

    An error of anygauge tells in its text what went wrong: it keeps no frame and no cause. One that a worker
    raised on purpose comes as itself. Of an error of a function of the caller the frames from that function
    on stay. With ``ANYGAUGE_DEBUG=1`` all is as it was.
    """

    def __call__(self, function: Function) -> Function:
        """Return the function with such errors."""
        return super().__call__(_errors_of_workers()(function))

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Cut the traceback of the error, if there is one."""
        if error is None or _is_debugged():
            return
        if isinstance(error, AnygaugeError | KeyboardInterrupt):
            error.__cause__ = error.__traceback__ = None
        elif theirs := _called_by_the_api(trace):
            error.__traceback__ = theirs


class _errors_of_workers(ContextDecorator):
    """Raise what a worker raised on purpose, in place of the failure of the worker."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, WorkerFailedError) and not _is_debugged() and (original := error.original()):
            raise original from None


def _is_debugged() -> bool:
    return os.environ.get("ANYGAUGE_DEBUG") == "1"


def _called_by_the_api(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames behind the last one of anygauge, if the API itself made the call."""
    last, behind = Path(), None
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(CORE):
            last, behind = path, trace.tb_next
        trace = trace.tb_next
    return behind if last.parent == API else None
