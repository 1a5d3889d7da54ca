"""Run an agent's program: ``python -m anygauge.rollout.gateway.guarded_command ROW PROGRAM ARGUMENT...``.

The program runs as the child of a :mod:`~anygauge.distributed.guard`, so that nothing that it starts is left
when it ends, and its output stays small.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from anygauge.distributed.guard import Tail, fork_guarded

__all__ = ["KEPT_BYTES", "main"]

KEPT_BYTES = 1 << 20
"""Bytes kept from the end of standard output and of standard error."""
_CANNOT_RUN = 127
"""Exit status, as shells have it."""


def main(row: int, command: list[str]) -> NoReturn:
    """Run a program.

    :param row: Descriptor of the file that becomes its standard input.
    """
    fork_guarded([row], [((name,), Tail(name, KEPT_BYTES)) for name in (1, 2)])
    os.setsid()  # an agent that ends its process group leaves the guard alone
    os.dup2(row, 0)
    os.close(row)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would the program
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_CANNOT_RUN)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
