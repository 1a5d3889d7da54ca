"""Processes that other programs than this one want forked: they ask through a socket.

Imports little: scripts that ask for a process import this module before they do.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anygauge_tests.fork_server import ForkServers

__all__ = ["answer_requests", "run_forked"]

_MESSAGE_BYTES = 1 << 17
_LOOK_S = 0.05


@contextmanager
def answer_requests(processes: ForkServers, path: Path) -> Iterator[None]:
    """Fork processes for all who ask, meanwhile.

    :param path: Of the socket; a directory that only this user can enter keeps others away.
    """
    processes.prepare()  # by a thread that stays: what a thread has started can die with it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        threading.Thread(target=_accept, args=(listening, processes), daemon=True).start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, processes: ForkServers) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # it was shut down
            return
        threading.Thread(target=_start, args=(connection, processes), daemon=True).start()


def _start(connection: socket.socket, processes: ForkServers) -> None:
    """Start a process and tell how it ends. It does not outlive who asked for it."""
    with connection:
        message, given, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
        if not message:
            return
        asked = json.loads(message)
        worker = processes.start(**asked, output=given[0], errors=given[1])
        for each in given:
            os.close(each)
        while worker.poll() is None:
            if select.select([connection], [], [], _LOOK_S)[0]:
                worker.kill()
                worker.wait()
                return
        with suppress(OSError):  # who asked was killed
            connection.send(str(worker.returncode).encode())


def run_forked(
    path: str, module: str, arguments: Sequence[str], env: Mapping[str, str], **options: Any
) -> int:
    """Ask for a process with the output of this one and return its exit code.

    :param path: Of the socket.
    :param options: As for :meth:`~anygauge_tests.fork_server.ForkServers.start`.
    """
    asked = {"module": module, "arguments": arguments, "env": env, "directory": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_BYTES)
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(asked | options).encode()], [1, 2])
        return int(connection.recv(16) or 1)
