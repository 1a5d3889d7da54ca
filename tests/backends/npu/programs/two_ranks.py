"""Run a Python program in two processes with ``RANK``, and a ``STORE`` file for them to meet.

python two_ranks.py PROGRAM ARGUMENTS...
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"STORE": str(Path(folder, "store")), "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv[1:]], env=environ | {"RANK": str(rank)})
            for rank in range(2)
        ]
        status = max(abs(rank.wait()) for rank in ranks)
    sys.exit(status)
