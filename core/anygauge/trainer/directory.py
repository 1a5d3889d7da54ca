"""The run directory: ``config.toml``, ``environment.json``, ``metrics.jsonl``, ``logs/``, ``hf/``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from anygauge.config import Config
from anygauge.config.load import write_resolved
from anygauge_hooks.errors import CheckpointError

__all__ = ["open_run_directory"]

CONFIG_FILE = "config.toml"


def open_run_directory(config: Config, environment: Mapping[str, str]) -> Path:
    """Make the run's directory, with the resolved config in it, and return its absolute path.

    :param environment: Facts about the host, kept beside the config.
    :raises CheckpointError: It cannot be made; or it holds something, and ``run.overwrite`` is not set or it
        is no earlier run.
    """
    directory = (config.run.directory / config.run.name).resolve()
    try:
        _fill(directory, config, environment)
    except OSError as error:
        raise CheckpointError(
            f"The run directory {directory} cannot be made: {error}.",
            hint="Name a directory that you may write to: --run.directory DIRECTORY.",
        ) from error
    return directory


def _fill(directory: Path, config: Config, environment: Mapping[str, str]) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        _clear(directory, overwrite=config.run.overwrite)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    write_resolved(config, directory / CONFIG_FILE)
    (directory / "environment.json").write_text(json.dumps(dict(environment), indent=2) + "\n")


def _clear(directory: Path, *, overwrite: bool) -> None:
    if not overwrite:
        raise CheckpointError(
            f"The run directory {directory} is not empty.",
            hint="Choose another --run.name, or delete the earlier run with --run.overwrite true.",
        )
    if not (directory / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{directory} was not made by a run, so it is not deleted: it has no {CONFIG_FILE}.",
            hint="Choose another --run.name or --run.directory.",
        )
    shutil.rmtree(directory)
