"""Find, verify and read checkpoints."""

from __future__ import annotations

import hashlib
import logging
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from anygauge.disk import read_json
from anygauge_hooks.errors import CheckpointError

__all__ = ["DIRECTORY", "MANIFEST", "Checkpoint", "checkpoint_paths", "latest_checkpoint", "read_checkpoint"]

logger = logging.getLogger(__name__)

FORMAT = 1
"""Format version of the manifest; another is refused."""
DIRECTORY = "checkpoints"
"""In the run directory."""
MANIFEST, DRIVER = "manifest.json", "driver.json"
HASHED_AT_ONCE = 4
_NAME = re.compile(r"step-(\d{8})")


class _State(BaseModel):
    """See :class:`anygauge.trainer.state.RunState`."""

    model_config = ConfigDict(strict=True)
    step: NonNegativeInt
    version: NonNegativeInt
    source: dict[str, Any]
    rollout: dict[str, Any] = {}


class _Driver(BaseModel):
    """The content of ``driver.json``."""

    model_config = ConfigDict(strict=True)
    step: NonNegativeInt
    state: _State
    files: dict[str, NonNegativeInt]
    packages: dict[str, str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    state: Mapping[str, Any]
    """Run state passed to :meth:`anygauge.run_directory.checkpoints.CheckpointWriter.start`."""
    files: Mapping[str, int]
    """Bytes that each append-only file of the run directory had."""
    packages: Mapping[str, str]
    """Versions of the packages that made it."""


def checkpoint_paths(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, the latest first."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), reverse=True)


def latest_checkpoint(run_directory: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is complete; damaged ones are skipped with a warning.

    :returns: ``None`` if the run has none.
    :raises CheckpointError: It has some, and all are damaged.
    """
    problems = []
    for path in checkpoint_paths(run_directory / DIRECTORY):
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error.args[0]))
            logger.warning("skipped a damaged checkpoint: %s", error.args[0])
    if problems:
        raise CheckpointError(
            "No checkpoint of the run can be used:\n  " + "\n  ".join(problems),
            hint="Restore the files, or start over with --overwrite or another --run.name.",
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after verifying its files.

    :raises CheckpointError: A file is missing or changed, or it is of another version's format.
    """
    manifest = _read_json(path / MANIFEST)
    if "format" not in manifest:
        raise _unusable(f"{path} is damaged or was not written by anygauge: its {MANIFEST} names no format.")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}; this version reads format {FORMAT}.",
            hint="Use the version of anygauge that wrote it.",
        )
    try:
        _check_ranks(path, manifest)
        _check_files(path, manifest["files"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _unusable(f"{path} lacks a key of a checkpoint: {error!r}") from error
    driver = _read_driver(path / DRIVER)
    return Checkpoint(path, driver["step"], driver["state"], driver["files"], driver["packages"])


def _unusable(problem: str) -> CheckpointError:
    return CheckpointError(problem, hint="Use another checkpoint.")


def rank_names(world_size: int, roles: Iterable[str] = ()) -> Iterator[str]:
    """Yield the names of the files that the ranks write last.

    :param roles: Beside the policy; each has a directory of its own.
    """
    directories = ("", *(f"{role}/" for role in dict.fromkeys(roles)))
    return (f"{directory}rank-{rank:05d}.json" for directory in directories for rank in range(world_size))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_ranks(path: Path, manifest: Mapping[str, Any]) -> None:
    wanted = rank_names(manifest["world_size"], manifest.get("roles", ()))
    # The first alone: a manifest may claim any number of ranks.
    missing = next((name for name in wanted if name not in manifest["files"]), None)
    if missing is not None:
        raise _unusable(f"{path} has no {missing}, and {manifest['world_size']} ranks wrote it")


def _check_files(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    with ThreadPoolExecutor(max_workers=HASHED_AT_ONCE) as threads:
        for problem in threads.map(partial(_damage, directory), files.items()):
            if problem:
                raise _unusable(problem)


def _damage(directory: Path, entry: tuple[str, Mapping[str, Any]]) -> str | None:
    """Return how a file differs from what the manifest says of it."""
    name, wanted = entry
    path = directory / name
    try:
        info = path.stat()
        if info.st_size != wanted["bytes"]:
            return f"{path} has {info.st_size} bytes instead of {wanted['bytes']}"
        if not stat.S_ISREG(info.st_mode):  # a pipe would be waited for, a device never ends
            return f"{path} is not a regular file"
        return None if sha256(path) == wanted["sha256"] else f"{path} has changed: its SHA-256 is another"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def _read_driver(path: Path) -> dict[str, Any]:
    """Return the driver's state.

    :raises CheckpointError: It cannot be read, or has other types.
    """
    driver = _read_json(path)
    try:
        _Driver.model_validate(driver)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise _unusable(f"{path} is not a valid driver state: {key}: {problem['msg']}.") from error
    return driver


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise _unusable(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise _unusable(f"{path} holds no object.")
    return value
