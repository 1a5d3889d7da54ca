"""Log files ``logs/``: output of the driver and of each worker, each line with its time."""

from __future__ import annotations

import faulthandler
import logging
import os
import platform
import re
import shlex
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from anygauge.config.secret_values import without_secrets
from anygauge.observability.control_characters import VisibleFormatter, format_warning
from anygauge.observability.eval_names import EVAL_RESULT
from anygauge.version import __version__

__all__ = ["DRIVER_LOG", "driver_log", "log_worker", "summary"]

_log = logging.getLogger(__name__)

DRIVER_LOG = "logs/driver.log"
"""In the run directory."""
OURS = "anygauge"
"""Prefix of our loggers' names, those of backends and models included."""
TIME = "%Y-%m-%d %H:%M:%S"
STACKS_SIGNAL = signal.SIGUSR1


class _Lines(VisibleFormatter):
    """One line per event; the further lines of one with more are indented.

    :param secrets: Masked wherever they stand, also in command lines and tracebacks.
    """

    def __init__(self, form: str, secrets: Collection[str] = ()) -> None:
        super().__init__(form, TIME)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record), self._secrets).replace("\n", "\n    ")


class _LogFile(logging.FileHandler):
    """A file that does not end a run, nor hide what ended it: what a full disk refuses is warned of once."""

    _is_lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            self._lose(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()  # which writes what is still in the buffer
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if not self._is_lost:
            self._is_lost = True  # first: the warning comes here too
            _log.warning("%s cannot be written, and lines of it are lost: %s", self.baseFilename, error)


def _wanted(record: logging.LogRecord) -> bool:
    """Keep what we say, and what others warn of."""
    return record.name.startswith(OURS) or record.levelno >= logging.WARNING


SHOWN = re.compile(rf"rollout/raw_reward|train/(loss|grad_norm)|{EVAL_RESULT}|perf/step_time")
"""Metrics that are in the line of a step or of an evaluation."""


def summary(metrics: Mapping[str, float]) -> str:
    """Return the metrics that tell how a step or an evaluation went, on one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if SHOWN.fullmatch(name))


def log_worker(role: str, rank: int) -> None:
    """Log this process to standard error, with time and rank.

    Warnings of Python lose their control characters there.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(
        _Lines(f"%(asctime)s.%(msecs)03d %(levelname)s [{role}-{rank}] %(name)s: %(message)s")
    )
    handler.addFilter(_wanted)
    root = logging.getLogger()
    root.addHandler(handler)
    warnings.formatwarning = format_warning
    root.setLevel(logging.INFO)  # the loggers of backends and models are no children of the core's


@contextmanager
def driver_log(directory: Path, *, backend: str, secrets: Collection[str] = ()) -> Iterator[Path]:
    """Log this process, and the start and end of the run, to ``logs/driver.log``.

    The core's loggers are heard from INFO on, others and Python's warnings from WARNING on. An error that
    leaves the block is written with its traceback. What the file holds already stays. While the block runs,
    SIGUSR1 adds the stack of every thread.

    :param directory: Directory of the run; exists.
    :param backend: Description of the backend in the first line.
    :param secrets: Values that are masked, such as keys that were given on the command line.
    :returns: The file.
    """
    path = directory / DRIVER_LOG
    path.parent.mkdir(exist_ok=True)
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Lines("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", secrets))
    handler.addFilter(_wanted)
    alone = logging.Logger(f"{OURS}.run")  # beside the tree of loggers: what it says is not on the terminal
    alone.addHandler(handler)
    try:
        with _listening(handler), _warnings_to(alone), _stacks_to(handler.stream), _framed(alone, backend):
            yield path
    finally:
        handler.close()


@contextmanager
def _framed(log: logging.Logger, backend: str) -> Iterator[None]:
    """Write the first line and the last."""
    started = time.monotonic()
    host, python = socket.gethostname(), platform.python_version()
    log.info(
        "anygauge %s, backend %s, pid %d on %s, Python %s", __version__, backend, os.getpid(), host, python
    )
    log.info("in %s: %s", Path.cwd(), shlex.join([sys.executable, *sys.argv]))
    with ExitStack() as block:
        block.push(lambda kind, error, _: _write_end(log, time.monotonic() - started, error))
        yield


def _write_end(log: logging.Logger, seconds: float, error: BaseException | None) -> None:
    if error is None:
        log.info("done after %.1f s", seconds)
    elif isinstance(error, KeyboardInterrupt | SystemExit):
        log.error("stopped after %.1f s: %s", seconds, type(error).__name__)
    else:
        log.error("failed after %.1f s", seconds, exc_info=error)


@contextmanager
def _listening(handler: logging.Handler) -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger(OURS)
    level = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(level)
        root.removeHandler(handler)


@contextmanager
def _warnings_to(log: logging.Logger) -> Iterator[None]:
    """Also write Python's warnings to a logger."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        log.warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)
        shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


@contextmanager
def _stacks_to(file: Any) -> Iterator[None]:
    """Write every thread's stack at a signal, where this is the thread that may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
