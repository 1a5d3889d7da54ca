"""Processes of pytest-xdist that are forked as :mod:`anygauge_tests.fork_server` does it.

Each of them imports what it tests, and so does the process that it forks others from. Forked, they have both.
This file is the script that stands for their interpreter too, so it imports little.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_tests.fork_server_requests import answer_requests, run_forked

if TYPE_CHECKING:
    from anygauge_tests.fork_server import ForkServers

__all__ = ["forked_test_processes"]


@contextmanager
def forked_test_processes(processes: ForkServers, specs: Sequence[Any], directory: Path) -> Iterator[None]:
    """Let xdist's processes be forked, with a warm process for each, meanwhile.

    :param specs: Of execnet, one for each process.
    :param directory: For a socket.
    """
    path = directory / "test_processes"
    with answer_requests(processes, path):
        for spec in specs:
            if spec.popen and not spec.python:
                spec.python = shlex.join([sys.executable, "-P", __file__, str(path)])
        yield


def _main(path: str, *command: str) -> int:
    """Run what the interpreter was asked to, ``-u -c CODE``, and return the exit code."""
    module, env = "anygauge_tests.fork_server_code", dict(os.environ)
    return run_forked(path, module, command[-1:], env, has_own=True, new_session=False)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
