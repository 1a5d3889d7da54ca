"""Workers of a Ray cluster that are forked with everything imported, as :mod:`anygauge.testing.warm` does it.

Ray starts a script that sets up an environment and then becomes the worker: that is two imports of Ray before
the first of torch. Here another script takes its place. It asks the process of the tests for the worker, and
ends as that does. Ray knows a worker by a token in its arguments, whichever process it is.

This file is that script too, so it imports little.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anygauge.testing.warm import WarmProcesses

__all__ = ["warm_ray_workers"]

_SOCKET = "ANYGAUGE_TEST_RAY_WORKERS"
_MESSAGE_BYTES = 1 << 17
_LOOK_S = 0.05


@contextmanager
def warm_ray_workers(processes: WarmProcesses, directory: Path, ray_constants: Any) -> Iterator[None]:
    """Let the workers of a cluster be forked that this process starts, and ends, meanwhile.

    :param directory: For a socket.
    :param ray_constants: The module of Ray that names the script.
    """
    processes.prepare()  # by a thread that stays: what a thread has started can die with it
    path, script = str(directory / "workers"), ray_constants.SETUP_WORKER_FILENAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        threading.Thread(target=_accept, args=(listening, processes), daemon=True).start()
        os.environ[_SOCKET] = path
        ray_constants.SETUP_WORKER_FILENAME = (
            __file__  # joined to a folder, an absolute path stays what it is
        )
        try:
            yield
        finally:
            ray_constants.SETUP_WORKER_FILENAME = script
            del os.environ[_SOCKET]
            listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, processes: WarmProcesses) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # it was shut down
            return
        threading.Thread(target=_start, args=(connection, processes), daemon=True).start()


def _start(connection: socket.socket, processes: WarmProcesses) -> None:
    """Start a worker and tell how it ends. It does not outlive who asked for it."""
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
        with suppress(OSError):  # Ray has killed who asked
            connection.send(str(worker.returncode).encode())


# -------------------------------------------------------------------------
# The script
# -------------------------------------------------------------------------


def _main() -> int:
    """Take the arguments that Ray's own script takes, and return the exit code of the worker."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, (script, *arguments) = parser.parse_known_args()
    variables = json.loads(known.serialized_runtime_env_context).get("env_vars") or {}
    env = {**os.environ, **variables}
    asked = {"module": script, "arguments": arguments, "env": env, "directory": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_BYTES)
        connection.connect(env.pop(_SOCKET))
        socket.send_fds(connection, [json.dumps(asked).encode()], [1, 2])
        return int(connection.recv(16) or 1)


if __name__ == "__main__":
    sys.exit(_main())
