"""``anygauge launch``, whose node forks its workers like that of the tests. Run by test_cluster_two_nodes."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from ray._private import ray_constants

from anygauge.cli import main
from anygauge_tests import fork_server_ray


def run_here(program: str, command: Sequence[str]) -> None:
    """Run what this process is to be replaced by, ``PYTHON -m MODULE ARGUMENTS``."""
    assert (program, command[1]) == (sys.executable, "-m")
    sys.argv[:] = command[2:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    ray_constants.SETUP_WORKER_FILENAME = fork_server_ray.__file__
    os.execv = run_here
    sys.exit(main(sys.argv[1:]))
