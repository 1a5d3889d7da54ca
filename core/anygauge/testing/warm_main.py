"""``python -m anygauge`` in a forked process, whose workers and probes are forked too."""

from __future__ import annotations

import importlib
import os
import runpy
import sys

from anygauge.testing import warm
from anygauge.testing.warm_probes import warm_probes

if __name__ == "__main__":
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.abspath(folder) for folder in folders if folder]
    processes = warm.running()
    assert processes is not None
    doctor = importlib.import_module("anygauge.cli.doctor")
    with warm.warm_workers(processes), warm_probes(processes, doctor):
        runpy.run_module("anygauge", run_name="__main__", alter_sys=True)
