"""Built-in trackers, progress display and host facts."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from anygauge.config.rules.profile import TORCH
from anygauge.extras import install_extra
from anygauge.observability.datasets import dataset_names
from anygauge.observability.progress import RunProgress
from anygauge_hooks import hookimpl
from anygauge_hooks.types import BackendSpec, ConfigProblem, RunInfo, Tracker, TrackerSpec

_progress = RunProgress()
before_train = _progress.before_train
after_rollout = _progress.after_rollout
after_train_step = _progress.after_train_step
after_evaluate = _progress.after_evaluate
on_wait = _progress.on_wait
after_save_checkpoint = _progress.after_save_checkpoint
on_error = _progress.on_error
after_train = _progress.after_train

OPTIONS: Mapping[str, Mapping[str, type]] = {
    "jsonl": {},
    "tensorboard": {"dir": str},
    "wandb": {
        **dict.fromkeys(("project", "entity", "name", "group", "job_type", "notes", "mode", "dir"), str),
        "tags": list,
    },
    "trackio": dict.fromkeys(("project", "name", "group", "space_id", "server_url"), str),
}
"""Keys that ``run.tracker_options`` may have for each tracker of the core."""
WANDB_MODES = ("online", "offline", "disabled")


@hookimpl
def register_trackers() -> list[TrackerSpec]:
    """Return ``jsonl``, ``tensorboard``, ``wandb`` and ``trackio``."""
    return [TrackerSpec(name=name, make=partial(_make, name)) for name in OPTIONS]


def _make(name: str, run: RunInfo) -> Tracker:
    module = import_module(f"anygauge.observability.{name}")
    tracker: Tracker = getattr(module, f"make_{name}_tracker")(run)
    return tracker


@hookimpl
def check_config(config: Any) -> list[ConfigProblem]:
    """Return trackers whose package is missing, their wrong options, and data sets' impossible names."""
    return [*_missing_packages(config), *_tracker_options(config), *dataset_names(config)]


def _missing_packages(config: Any) -> Iterator[ConfigProblem]:
    for index, name in enumerate(config.run.trackers):
        if name in OPTIONS and name != "jsonl" and not _is_installed(name):
            hint = f"the package {name} is not installed: {install_extra(name)}"
            yield ConfigProblem(path=f"run.trackers[{index}]", found=name, hint=hint)


def _is_installed(package: str) -> bool:
    # A folder of this name, such as the one that wandb makes, counts as a package without an origin.
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _tracker_options(config: Any) -> Iterator[ConfigProblem]:
    """Yield options that no tracker takes; a tracker of the core keeps its own while it is not in use."""
    for name, options in config.run.tracker_options.items():
        path = f"run.tracker_options.{name}"
        if name not in {*OPTIONS, *config.run.trackers}:
            hint = f"add {name!r} to run.trackers, or leave this out"
            yield ConfigProblem(path=path, found=options, hint=hint)
        elif name in OPTIONS:
            yield from _options_of(name, options, path)


def _options_of(name: str, options: Mapping[str, Any], path: str) -> Iterator[ConfigProblem]:
    known = OPTIONS[name]
    for key, value in options.items():
        if key not in known:
            hint = f"tracker {name} has no such option; it has {', '.join(sorted(known)) or 'none'}"
        elif not isinstance(value, known[key]):
            hint = f"write a {'string' if known[key] is str else 'list of strings'}"
        elif (name, key) == ("wandb", "mode") and value not in WANDB_MODES:
            hint = f"write one of {', '.join(WANDB_MODES)}"
        else:
            continue
        yield ConfigProblem(path=f"{path}.{key}", found=value, hint=hint)


@hookimpl
def make_profiler(backend: BackendSpec, kind: str, path: str) -> AbstractContextManager[None] | None:
    """Return torch's profiler, or its history of allocations for a backend that names this kind."""
    from anygauge.observability.profiler import memory_profile, torch_profile

    if kind == "memory" and kind in backend.profile_kinds:
        return memory_profile(backend.device_type, path)
    return torch_profile(backend.device_type, path) if kind == TORCH else None


@hookimpl
def report_environment() -> dict[str, str]:
    """Return the interpreter, the host, its CPUs and its memory."""
    from anygauge_hooks.resources import read_cpus, read_memory

    cpus, memory = read_cpus(), read_memory()
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cpus": f"{cpus.usable:g} usable of {cpus.present}",
        "memory": f"{memory.available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f} GiB",
    }
