"""Workers as plain processes of this host, without Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait

from anygauge.distributed.child_process import ChildProcess
from anygauge.failures import on_failure
from anygauge.runtime.diagnostics import dump_stacks, log_size, tail
from anygauge.runtime.rpc import Died, encode
from anygauge.runtime.worker import HostInfo
from anygauge.runtime.worker_group import LaunchSpec

__all__ = ["LocalTransport"]

POLL_S = 0.2
"""Interval of checks whether a process has ended without closing its connection."""
EXIT_GRACE_S = 5.0
"""For a worker that was closed to exit by itself."""
TERMINATE_GRACE_S = 2.0
"""Grace period between the request to end a process and its kill."""


class _Process(ChildProcess):
    """One worker process and its log."""

    def __init__(self, spec: LaunchSpec, rank: int) -> None:
        self.log = spec.log(rank)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log_start = log_size(self.log)
        self.alive = True
        # The kernel's death signal follows the thread that starts a process: only the main one asks for it.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with self.log.open("ab") as log:
            super().__init__("anygauge.runtime.worker_main", [str(parent)], output=log.fileno(), env=spec.env)

    def reap(self) -> str:
        """Kill the process and its children, and return how it ended."""
        how = super().reap()
        self.connection.close()
        return how

    def died(self) -> Died:
        """Return how the process ended."""
        self.alive = False
        exited = self.wait_exit(TERMINATE_GRACE_S)
        how = self.reap()
        return Died(
            how=how if exited else "closed its connection but went on running",
            log=tail(self.log, self.log_start),
        )


class LocalTransport:
    """Processes that are children of this one, each at the end of a socket pair."""

    death_grace_s = 0.5
    cluster = ""

    def __init__(self, spec: LaunchSpec) -> None:
        self.driver_node = socket.gethostname()
        self._processes: list[_Process] = []
        self._located = False
        with on_failure(partial(self.end, orderly=False)):
            for rank in range(spec.num_workers):
                self._processes.append(_Process(spec, rank))
            for rank, process in enumerate(self._processes):
                self._greet(process, spec, rank)

    def _greet(self, process: _Process, spec: LaunchSpec, rank: int) -> None:
        path = [os.path.abspath(entry) for entry in sys.path]
        _send(process, encode(path))
        _send(process, encode(spec.setup(rank)))

    def send(self, rank: int, message: bytes) -> None:
        """Send a request. A process that has died is reported by :meth:`wait`."""
        if self._processes[rank].alive:
            _send(self._processes[rank], message)

    def wait(self, timeout_s: float) -> Mapping[int, bytes | Died]:
        """Return replies and deaths once there are any; empty at the deadline. Each death comes once."""
        deadline = time.monotonic() + timeout_s
        while True:
            alive = {rank: process for rank, process in enumerate(self._processes) if process.alive}
            remaining = max(0.0, deadline - time.monotonic())
            ready = wait([process.connection for process in alive.values()], min(remaining, POLL_S))
            arrived = {
                rank: _receive(process)
                for rank, process in alive.items()
                if process.connection in ready or process.exited()
            }
            if arrived or remaining == 0.0:
                return arrived

    def located(self, hosts: Sequence[HostInfo]) -> None:
        """Learn where the workers run; from now on they can be asked for their stacks."""
        assert [host.pid for host in hosts] == [process.pid for process in self._processes]
        self._located = True

    def stacks(self, ranks: Sequence[int]) -> Mapping[int, str]:
        """Return the thread stacks of running workers, by rank; empty before they were located."""
        asked = [rank for rank in ranks if self._located and not self._processes[rank].exited()]
        return {rank: dump_stacks(self._processes[rank].pid, self._processes[rank].log) for rank in asked}

    def end(self, *, orderly: bool) -> None:
        """End every process and whatever it started, and return when all are gone."""
        try:
            if orderly:
                _wait_all(self._processes, EXIT_GRACE_S)
            for process in self._processes:
                process.signal(signal.SIGTERM)
            _wait_all(self._processes, TERMINATE_GRACE_S)
        finally:
            for process in self._processes:
                process.reap()


def _send(process: _Process, message: bytes) -> None:
    try:
        process.connection.send_bytes(message)
    except BlockingIOError:
        process.signal(signal.SIGKILL)  # stopped or swapped out; its death is reported like any other
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has died: wait() tells how


def _receive(process: _Process) -> bytes | Died:
    try:
        if process.connection.poll(0):
            return process.connection.recv_bytes()
    except (EOFError, ConnectionResetError, BlockingIOError):
        pass
    return process.died()


def _wait_all(processes: Sequence[_Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.wait_exit(max(0.0, deadline - time.monotonic()))
