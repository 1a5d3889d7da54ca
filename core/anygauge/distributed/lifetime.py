"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with"]

PR_SET_PDEATHSIG = 1


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
