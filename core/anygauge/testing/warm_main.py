"""``python -m anygauge`` in a forked process, whose workers are forked too."""

from __future__ import annotations

import os
import runpy
import sys

from anygauge.testing import warm

if __name__ == "__main__":
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.abspath(folder) for folder in folders if folder]
    processes = warm.running()
    assert processes is not None
    with warm.warm_workers(processes):
        runpy.run_module("anygauge", run_name="__main__", alter_sys=True)
