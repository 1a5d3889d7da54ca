"""Entry point of a local worker process: ``python -m anygauge.runtime.worker_main FD PARENT``.

The process leads its own session, so that Ctrl-C on the terminal reaches the driver alone, and so that it can
be ended together with whatever it started. It never outlives its driver: the end of the connection ends it
even in the middle of a call, and on Linux the kernel does so even if Python cannot run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

from anygauge.distributed.garbage import skip_last_collection
from anygauge.distributed.lifetime import die_with
from anygauge.runtime.diagnostics import enable_stacks
from anygauge.runtime.rpc import decode
from anygauge.runtime.worker import Worker

__all__ = ["main"]


def main(descriptor: int, parent: int) -> None:
    """Serve the driver until it closes the worker.

    :param descriptor: Descriptor of the socket that leads to the driver.
    :param parent: Process id of the driver, or 0 if the driver's thread may end before its process.
    """
    skip_last_collection()
    os.set_inheritable(descriptor, False)
    enable_stacks()
    die_with(parent)
    connection = Connection(descriptor)
    sys.path[:] = decode(connection.recv_bytes())
    worker = Worker(decode(connection.recv_bytes()))
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    while not worker.closed:
        connection.send_bytes(worker.handle(inbox.get()))


def _receive(connection: Connection, inbox: SimpleQueue[bytes]) -> None:
    """Queue what arrives; once the driver has gone, end this process and its children."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
