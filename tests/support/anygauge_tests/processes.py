"""Processes that tests wait for, whoever their parents are by then, and the addresses of their host."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable

import psutil

__all__ = ["has_ipv6", "until", "wait_until_ended"]


def has_ipv6() -> bool:
    """Return whether this host has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait for something that another process does."""
    ends = time.monotonic() + within_s
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < ends, "it did not happen in time"
        await asyncio.sleep(0.005)


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
