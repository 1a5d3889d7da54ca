"""Recorder of the functions that a process enters; Python imports it at its start (``bench/road.py``).

The first byte of a file that all processes map is the step that is recorded, or 0. A process writes each
function that it enters in a step to a file of its own, as soon as it does: it may be killed at the end of the
run.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from inspect import CO_NEWLOCALS
from types import FrameType
from typing import Any

STEP_FILE, OUTPUT, ROOTS = "RECORDER_STEP_FILE", "RECORDER_OUTPUT", "RECORDER_ROOTS"
EXPRESSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def record(step_file: str, output: str, roots: tuple[str, ...]) -> None:
    """Record the functions of this process from now on, in every thread that Python starts.

    :param output: A directory.
    :param roots: Directories of the packages whose functions are recorded.
    """
    with open(step_file, "rb") as file:
        step = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    path = os.path.join(output, str(os.getpid()))
    sink = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(sink, f"{main_module(sys.orig_argv)}\n".encode())
    known = set[tuple[int, int]]()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not (now := step[0]):
            return
        code = frame.f_code
        if (now, id(code)) in known:
            return
        known.add((now, id(code)))
        is_function = code.co_flags & CO_NEWLOCALS and code.co_name not in EXPRESSIONS
        if is_function and code.co_filename.startswith(roots):
            os.write(sink, f"{now}\t{code.co_filename}\t{code.co_qualname}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)


def main_module(arguments: list[str]) -> str:
    """Return the module that ``python -m`` runs."""
    return arguments[arguments.index("-m") + 1] if "-m" in arguments else " ".join(arguments)[:80]


if STEP_FILE in os.environ:
    record(os.environ[STEP_FILE], os.environ[OUTPUT], tuple(os.environ[ROOTS].split(os.pathsep)))
