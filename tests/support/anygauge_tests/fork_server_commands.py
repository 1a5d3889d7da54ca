"""Shell commands that are forked from a process that has everything imported.

A folder on the shell's ``PATH`` has stand-ins for ``anygauge`` and ``python``. They ask the process of the
tests for a fork, and end as it does. This file is their script too, so it imports little.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge_tests.fork_server_requests import answer_requests, run_forked

if TYPE_CHECKING:
    from anygauge_tests.fork_server import ForkServers

__all__ = ["forked_commands"]

_STAND_IN = """#!/bin/sh
exec '{python}' -P '{script}' '{socket}' {name} "$@"
"""


@contextmanager
def forked_commands(processes: ForkServers, directory: Path) -> Iterator[Path]:
    """Yield a folder for ``PATH``, whose commands work meanwhile.

    :param directory: For the folder and a socket.
    """
    folder, socket = directory / "bin", directory / "commands"
    folder.mkdir()
    for name in ("anygauge", "python"):
        text = _STAND_IN.format(python=sys.executable, script=__file__, socket=socket, name=name)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with answer_requests(processes, socket):
        yield folder


def _main(socket: str, name: str, *arguments: str) -> int:
    """Run a command and return its exit code. Only scripts of Python are forked, not ``python -c``."""
    env = dict(os.environ)
    if name == "anygauge":
        return run_forked(socket, "anygauge_tests.fork_server_main", arguments, env, has_own=True)
    if not arguments[0].endswith(".py"):
        os.execv(sys.executable, [sys.executable, *arguments])
    script, *rest = arguments
    return run_forked(socket, script, rest, env)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
