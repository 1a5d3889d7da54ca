"""Checkpoints as the driver sees them: directories that are complete or do not exist.

The ranks write their files into ``.step-N.partial`` while the run goes on. When all have, the driver adds its
own state and a manifest with every file's size and SHA-256, sees all of it to the disk and renames the
directory to ``step-N``. So a directory of that name is whole, whenever the run was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from anygauge.config import Config
from anygauge.config.load import dump_config
from anygauge.trainer.worker_group import WorkerGroup
from anygauge_hooks.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointWriter", "append_only_files", "export_hf", "latest_checkpoint"]

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the manifest; another is refused."""
DIRECTORY = "checkpoints"
MANIFEST, DRIVER = "manifest.json", "driver.json"
SUPERSEDED = ".superseded.jsonl"
"""Ends the names of files with what an earlier part of the run wrote after the checkpoint."""
POLL_S = 0.01
HASHED_AT_ONCE = 4
PACKAGES = ("anygauge", "megatron-core", "numpy", "torch", "transformers")
"""Whose versions decide the bits of a step."""
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    state: Mapping[str, Any]
    """What :meth:`CheckpointWriter.start` was given."""
    files: Mapping[str, int]
    """Bytes that each append-only file of the run directory had."""
    packages: Mapping[str, str]
    """Versions of the packages that made it."""


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is being written."""

    step: int
    partial: Path
    driver: bytes
    completing: Future[Path] | None = None
    """Set when every rank has written its files."""


class CheckpointWriter:
    """Saves a run while it goes on, one checkpoint at a time, and removes old ones.

    A checkpoint that cannot be written is a warning: the run goes on, and the earlier ones stay.

    :param directory: The run's; no other process may use it.
    """

    def __init__(self, directory: Path, config: Config, workers: WorkerGroup) -> None:
        self._run_directory = directory
        self._directory = directory / DIRECTORY
        self._config = config
        self._workers = workers
        self._constant = {
            "seed": config.run.seed,
            "config": hashlib.sha256(dump_config(config).encode()).hexdigest(),
            "packages": installed_packages(),
        }
        self._pending: _Pending | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        remove_leftovers(self._directory)

    def start(self, step: int, state: Mapping[str, Any]) -> Path | None:
        """Save the state after a step; returns once training may go on.

        :param state: Of the driver, as JSON can write it.
        :returns: The checkpoint before, if it was still being written.
        """
        before = self.finish()
        target = self._directory / f".step-{step:08d}.partial"
        try:
            target.mkdir(parents=True)
        except OSError as error:
            _warn_unwritten(step, str(error))
            return before
        self._workers.call("save_checkpoint", path=str(target))
        self._pending = _Pending(step, target, self._driver_state(step, state))
        return before

    def poll(self) -> Path | None:
        """Return the checkpoint that has become complete since the last call, if any. Does not wait."""
        pending = self._pending
        if pending is None:
            return None
        if pending.completing is None:
            if self._written(pending):
                files = partial(_complete, pending, self._config)
                pending.completing = self._thread.submit(files)
            return None
        return self._end(pending) if pending.completing.done() else None

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written, and return it if it became complete."""
        deadline = time.monotonic() + self._config.run.timeout_s
        while (pending := self._pending) is not None:
            if pending.completing is not None:
                return self._end(pending)
            if time.monotonic() > deadline:
                self._fail(pending, f"it took longer than run.timeout_s = {self._config.run.timeout_s}")
                return None
            self.poll()
            if pending.completing is None:
                time.sleep(POLL_S)
        return None

    def close(self) -> None:
        """Let what is being completed come to its end, and release the thread that does it."""
        self._thread.shutdown()

    def _driver_state(self, step: int, state: Mapping[str, Any]) -> bytes:
        described = {
            "step": step,
            "state": dict(state),
            "files": {path.name: path.stat().st_size for path in append_only_files(self._run_directory)},
            **self._constant,
        }
        return json.dumps(described, indent=1).encode()

    def _written(self, pending: _Pending) -> bool:
        """Return whether every rank has written its files; after a failure there is nothing pending."""
        answers: Sequence[bool | str] = self._workers.call("checkpoint_written")
        if any(answer is False for answer in answers):
            return False
        failures = [f"rank {rank}: {each}" for rank, each in enumerate(answers) if isinstance(each, str)]
        if failures:
            self._fail(pending, failures[0])
        return not failures

    def _end(self, pending: _Pending) -> Path | None:
        assert pending.completing is not None
        try:
            path = pending.completing.result()
        except (OSError, CheckpointError) as error:
            self._fail(pending, str(error))
            return None
        self._pending = None
        return path

    def _fail(self, pending: _Pending, reason: str) -> None:
        self._pending = None
        shutil.rmtree(pending.partial, ignore_errors=True)
        _warn_unwritten(pending.step, reason)


def _warn_unwritten(step: int, reason: str) -> None:
    logger.warning("no checkpoint of step %d: %s. The run goes on; earlier checkpoints stay.", step, reason)


def _complete(pending: _Pending, config: Config) -> Path:
    """Turn what the ranks have written into a checkpoint, remove those that are too old, and return it."""
    _write(pending.partial / DRIVER, pending.driver)
    manifest = {
        "format": FORMAT,
        "step": pending.step,
        "world_size": config.placement.num_workers,
        "files": dict(_describe(pending.partial)),
    }
    _write(pending.partial / MANIFEST, json.dumps(manifest, indent=1).encode())
    _directory_to_disk(pending.partial)
    target = pending.partial.with_name(f"step-{pending.step:08d}")
    publish(pending.partial, target)
    for old in checkpoint_paths(target.parent)[config.save.keep :]:
        remove(old)
    return target


def _describe(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name, bytes and SHA-256 of each file; those of tensors as the ranks found them while writing."""
    known: dict[str, Mapping[str, Any]] = {}
    for path in directory.glob("rank-*.json"):
        tensors = json.loads(path.read_bytes()).get("tensors", {})
        known[tensors.get("file", "")] = tensors
    for path in sorted(directory.iterdir()):
        size = path.stat().st_size
        digest = known[path.name]["sha256"] if path.name in known else _sha256(path)
        if path.name in known and known[path.name]["bytes"] != size:
            raise CheckpointError(
                f"{path} has {size} bytes, not the {known[path.name]['bytes']} that were written.",
                hint="Every worker must see the run directory as the driver does.",
            )
        yield path.name, {"bytes": size, "sha256": digest}


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _directory_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(source: Path, target: Path) -> None:
    """Rename a complete directory, in place of an earlier one of the name."""
    if target.exists():
        remove(target)
    source.rename(target)
    _directory_to_disk(target.parent)


def remove(path: Path) -> None:
    """Remove a directory; from the first moment on it has a name that nobody takes for a checkpoint."""
    leaving = path.with_name(f".{path.name}.removed")
    shutil.rmtree(leaving, ignore_errors=True)
    path.rename(leaving)
    shutil.rmtree(leaving)


def remove_leftovers(directory: Path) -> None:
    """Remove what a run left that was killed in the middle of a save or a removal."""
    for path in (*directory.glob(".step-*.partial"), *directory.glob(".step-*.removed")):
        shutil.rmtree(path)


def checkpoint_paths(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, the latest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), reverse=True)


def append_only_files(directory: Path) -> list[Path]:
    """Return the files of a run directory that only grow while the run goes on."""
    return sorted(path for path in directory.glob("*.jsonl") if not path.name.endswith(SUPERSEDED))


def installed_packages() -> dict[str, str]:
    """Return the versions of the packages that decide the bits of a step."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
            hint="Bring the files back, or start anew with --overwrite or another --run.name.",
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint whose files are all as they were written.

    :raises CheckpointError: A file is missing or changed, or it is of another version's format.
    """
    manifest = _read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}; this version reads format {FORMAT}.",
            hint="Resume with the version of anygauge that wrote it.",
        )
    try:
        _check_files(path, manifest["files"])
        driver = _read_json(path / DRIVER)
        return Checkpoint(path, driver["step"], driver["state"], driver["files"], driver["packages"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} lacks what a checkpoint has: {error!r}", hint="Resume from another checkpoint."
        ) from error


def _check_files(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    with ThreadPoolExecutor(max_workers=HASHED_AT_ONCE) as threads:
        for problem in threads.map(partial(_damage, directory), files.items()):
            if problem:
                raise CheckpointError(problem, hint="Resume from another checkpoint.")


def _damage(directory: Path, entry: tuple[str, Mapping[str, Any]]) -> str | None:
    """Return how a file differs from what the manifest says of it."""
    name, wanted = entry
    path = directory / name
    try:
        size = path.stat().st_size
        if size != wanted["bytes"]:
            return f"{path} has {size} bytes instead of {wanted['bytes']}"
        return None if _sha256(path) == wanted["sha256"] else f"{path} has changed: its SHA-256 is another"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="Resume from another.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no object.", hint="Resume from another.")
    return found


def export_hf(workers: WorkerGroup, target: Path) -> None:
    """Write the trained model as a Hugging Face directory, in place of one from before a resume."""
    if not target.exists():
        workers.call("save_hf", path=str(target))
        return
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    workers.call("save_hf", path=str(fresh))
    publish(fresh, target)
