"""The tracker, the progress display and the host facts that come with the core."""

from __future__ import annotations

import platform

from anygauge.observability.progress import RunProgress
from anygauge_hooks import hookimpl
from anygauge_hooks.types import TrackerSpec

_progress = RunProgress()
before_train = _progress.before_train
after_train_step = _progress.after_train_step
after_evaluate = _progress.after_evaluate
on_error = _progress.on_error
after_train = _progress.after_train


@hookimpl
def register_trackers() -> list[TrackerSpec]:
    """Return ``jsonl``."""
    from anygauge.observability.jsonl import make_jsonl_tracker

    return [TrackerSpec(name="jsonl", make=make_jsonl_tracker)]


@hookimpl
def report_environment() -> dict[str, str]:
    """Return the interpreter, the host, its CPUs and its memory."""
    from anygauge.observability.host import read_cpus, read_memory

    cpus, memory = read_cpus(), read_memory()
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cpus": f"{cpus.usable:g} usable of {cpus.present}",
        "memory": f"{memory.available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f} GiB",
    }
