"""Plugin of ``bench/road.py``: tells the recorders of all processes which step it is."""

from __future__ import annotations

import os
from pathlib import Path

from anygauge_hooks import hookimpl
from anygauge_hooks.types import RunInfo

WARM_UP = 2
"""Steps that are not recorded: they fill caches."""


@hookimpl
def after_train_step(run: RunInfo) -> None:
    """Begin to record the next step, or end it with the run."""
    following = run.step + 1
    is_recorded = WARM_UP < following <= run.total_steps
    with Path(os.environ["RECORDER_STEP_FILE"]).open("r+b") as file:
        file.write(bytes([following if is_recorded else 0]))
