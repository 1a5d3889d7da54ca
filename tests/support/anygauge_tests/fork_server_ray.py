"""Workers of a Ray cluster that are forked from a process that has everything imported.

Ray starts a script that sets up an environment and then becomes the worker: that is two imports of Ray before
the first of torch. Here another script takes its place. It asks the process of the tests for the worker, and
ends as that does. Ray knows a worker by a token in its arguments, whichever process it is.

This file is that script too, so it imports little.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_tests.fork_server_requests import answer_requests, run_forked

if TYPE_CHECKING:
    from anygauge_tests.fork_server import ForkServers

__all__ = ["forked_ray_workers"]

_SOCKET = "ANYGAUGE_TEST_RAY_WORKERS"


@contextmanager
def forked_ray_workers(processes: ForkServers, directory: Path, ray_constants: Any) -> Iterator[None]:
    """Let the workers of a cluster be forked that this process starts, and ends, meanwhile.

    :param directory: For a socket.
    :param ray_constants: The module of Ray that names the script.
    """
    path, script = directory / "workers", ray_constants.SETUP_WORKER_FILENAME
    with answer_requests(processes, path):
        os.environ[_SOCKET] = str(path)
        ray_constants.SETUP_WORKER_FILENAME = (
            __file__  # joined to a folder, an absolute path stays what it is
        )
        try:
            yield
        finally:
            ray_constants.SETUP_WORKER_FILENAME = script
            os.environ.pop(_SOCKET, None)  # it ends with the test that starts the cluster


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
    return run_forked(env.pop(_SOCKET), script, arguments, env)


if __name__ == "__main__":
    sys.exit(_main())
