"""``python -m anygauge`` in a forked process, whose probes are forked as its workers are."""

from __future__ import annotations

import importlib
import os
import runpy
import sys

from anygauge_tests import fork_server
from anygauge_tests.fork_server_probes import forked_probes

if __name__ == "__main__":
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.abspath(folder) for folder in folders if folder]
    processes = fork_server.running()
    assert processes is not None
    doctor = importlib.import_module("anygauge.cli.doctor")
    with forked_probes(processes, doctor):
        runpy.run_module("anygauge", run_name="__main__", alter_sys=True)
