"""Processes that tests wait for, whoever their parents are by then."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

__all__ = ["wait_until_ended"]


def wait_until_ended(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for processes to end, and return those that still run after ``timeout_s``.

    ``psutil.wait_procs`` also waits until an orphan is reaped, which takes its new parent seconds.
    """
    deadline = time.monotonic() + timeout_s
    running = [each for each in processes if _runs(each)]
    while running and time.monotonic() < deadline:
        time.sleep(0.01)
        running = [each for each in running if _runs(each)]
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
