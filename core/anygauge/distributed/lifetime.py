"""Lifetime of child processes: they do not outlive the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

__all__ = ["adopt_orphans", "die_with", "end_children"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, where the kernel can.

    :param parent: Process id, or 0 if the parent's thread may end before its process.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or not parent:
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, where the kernel can."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill and reap the children of this process, and those that it adopts by that, until it has none."""
    import psutil

    with suppress(ChildProcessError):
        while True:
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            os.waitpid(-1, 0)
