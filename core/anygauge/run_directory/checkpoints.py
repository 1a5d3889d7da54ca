"""Checkpoint writer of the driver: a directory is complete or does not exist.

The ranks write their files into ``.step-N.partial`` while the run goes on. When all have, the driver adds its
own state and a manifest with every file's size and SHA-256, sees all of it to the disk and renames the
directory to ``step-N``. So a directory of that name is whole, whenever the run was killed.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from anygauge.config import Config
from anygauge.disk import directory_to_disk, publish, read_json, remove, write_file
from anygauge.failures import in_background
from anygauge.observability.logs import DRIVER_LOG
from anygauge.run_directory.checkpoint_reader import (
    DIRECTORY,
    DRIVER,
    FORMAT,
    MANIFEST,
    checkpoint_paths,
    rank_names,
    sha256,
)
from anygauge.run_directory.write_progress import WriteProgress, export_progress
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.strict_json import plain_value
from anygauge_hooks.errors import CheckpointError

__all__ = ["CheckpointWriter", "append_only_files", "export_hf", "installed_packages"]

logger = logging.getLogger(__name__)

SUPERSEDED = ".superseded.jsonl"
"""Ends the names of files with what an earlier part of the run wrote after the checkpoint."""
POLL_S = 0.01
CLOSE_S = 60.0
"""Longest that the end of a run waits for a disk."""
SALVAGE_S = 5.0
"""Longest that a run which an error or a signal ends waits for the checkpoint that is being written."""
PACKAGES = ("anygauge", "megatron-core", "numpy", "torch", "transformers")
"""Packages whose versions decide the bits of a step."""
T = TypeVar("T")


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is being written."""

    step: int
    partial: Path
    driver: bytes = b""
    completing: Future[Path] | None = None
    """Set when every rank has written its files."""
    replaces: bool = True
    """Whether older checkpoints make room for it."""
    given_up: threading.Event = field(default_factory=threading.Event)


class CheckpointWriter:
    """Saves a run while it goes on, one checkpoint at a time, and removes old ones.

    A checkpoint that cannot be written is a warning: the run goes on, and the earlier ones stay.

    :param directory: The run's; no other process may use it.
    :param on_wait: Called with a line every few seconds while the run waits for a checkpoint.
    :param scores: Value of ``save.best`` by step, which grows while the run goes on.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        workers: WorkerGroup,
        on_wait: Callable[[str], None] = logger.info,
        *,
        scores: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        self._run_directory = directory
        self._directory = directory / DIRECTORY
        self._config = config
        self._workers = workers
        self._on_wait = on_wait
        self._scores = scores
        self._packages = installed_packages()
        self._pending: _Pending | None = None
        self._tidying: Future[None] | None = None
        self.complete = 0
        """Step of the last checkpoint that was written; 0 before the first."""
        self._latest = 0
        """The step of the latest checkpoint that replaces older ones."""
        self._is_untidy = False
        """Whether a checkpoint became complete while older ones were being removed."""
        self._failed: list[int] = []
        """Steps without a checkpoint since the last one that was written."""
        remove_leftovers(self._directory)

    @property
    def writing(self) -> int | None:
        """Step of the checkpoint that is being written."""
        return None if self._pending is None else self._pending.step

    def start(self, step: int, state: Mapping[str, Any], *, replaces: bool = True) -> Path | None:
        """Save the state after a step; returns once training may go on.

        :param state: State of the driver. Labels and metadata that JSON does not know are written as text.
        :param replaces: Whether it counts among those of ``save.keep``, so that older ones are removed.
        :returns: The checkpoint before, if it was still being written.
        """
        before = self.finish()
        target = self._directory / f".{_name(step)}.partial"
        try:
            self._directory.mkdir(exist_ok=True)
            target.mkdir()
        except OSError as error:
            self._warn(step, str(error))
            return before
        self._workers.call("save_checkpoint", path=str(target))
        self._pending = _Pending(step, target, replaces=replaces)
        try:
            self._pending.driver = self._driver_state(step, state)
        except OSError as error:
            self._fail(self._pending, str(error))
        return before

    def poll(self) -> Path | None:
        """Return the checkpoint that has become complete since the last call, if any. Does not wait."""
        pending = self._pending
        if pending is None:
            return None
        if pending.completing is None:
            if self._written(pending):
                self._complete_in_thread(pending)
            return None
        return self._end(pending, pending.completing) if pending.completing.done() else None

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written, and return it if it became complete."""
        deadline = time.monotonic() + self._config.run.timeout_s
        progress = None
        while (path := self.poll()) is None and (pending := self._pending) is not None:
            progress = progress or WriteProgress(pending.partial, _name(pending.step), self._on_wait)
            progress.update()
            if time.monotonic() > deadline:
                self._fail(pending, f"it took longer than run.timeout_s = {self._config.run.timeout_s}")
            else:
                time.sleep(POLL_S)
        return path

    def salvage(self, *, are_writing: bool) -> Path | None:
        """Complete the checkpoint that was being written when the run broke off, and return it if it can be.

        The workers are not asked, since they may be busy or gone: a rank's last file is whole when all of its
        files are.

        :param are_writing: Whether the workers are still there, so that waiting for their files is of use.
        """
        deadline = time.monotonic() + SALVAGE_S
        path = None
        while (pending := self._pending) is not None and path is None and time.monotonic() < deadline:
            if pending.completing is None:
                if pending.driver and _is_whole(pending.partial, self._config.placement.train_workers):
                    self._complete_in_thread(pending)
                elif not are_writing:
                    break
            elif pending.completing.done():
                path = self._end(pending, pending.completing)
            time.sleep(POLL_S)
        return path

    def require_last(self) -> None:
        """See to it that the end of a run without its last checkpoint is not taken for a good one.

        :raises CheckpointError: The last save failed; tells what there is to go on from.
        """
        if not self._failed:
            return
        there = checkpoint_paths(self._directory)
        kept = f"the last good one is {there[0]}" if there else "the run has none"
        exported = self._run_directory / "hf"
        model = f" The trained model is in {exported}." if exported.is_dir() else ""
        then = "take the steps since then again with --resume" if there else "start over with --overwrite"
        raise CheckpointError(
            f"The run took all its steps, but its last checkpoint, of step {self._failed[-1]}, could not be "
            f"written: {kept}.{model}",
            hint=f"{self._run_directory / DRIVER_LOG} has the reason. Remove the cause, and {then}.",
        )

    def close(self) -> None:
        """Wait for saves and removals in progress, unless the disk is stuck."""
        self._wait_for_threads()
        if self._is_untidy and self._is_tidied:
            self._tidy()
            self._wait_for_threads()
        if self._tidying is not None and self._tidying.done():
            self._tidying.result()

    def _wait_for_threads(self) -> None:
        completing = self._pending.completing if self._pending is not None else None
        under_way: list[Future[Any]] = [each for each in (completing, self._tidying) if each is not None]
        wait(under_way, timeout=CLOSE_S)

    @property
    def _is_tidied(self) -> bool:
        return self._tidying is None or self._tidying.done()

    def _tidy(self) -> None:
        """Begin to remove old checkpoints, or note that it is to be done again: a disk may be slow."""
        self._is_untidy = not self._is_tidied
        if not self._is_untidy:
            keep, best = self._config.save.keep, self._best()
            self._tidying = in_background(
                partial(_remove_old, self._directory, keep, self._latest, best), "checkpoint"
            )

    def _best(self) -> str | None:
        """Return the name of the best checkpoint that is there, the latest of equal ones."""
        sign = 1 if self._config.save.best_is == "highest" else -1
        scores = {_name(step): sign * score for step, score in self._scores.items()}
        there = [path.name for path in checkpoint_paths(self._directory) if path.name in scores]
        return max(there, key=scores.__getitem__, default=None)

    def _driver_state(self, step: int, state: Mapping[str, Any]) -> bytes:
        described = {
            "step": step,
            "state": dict(state),
            "files": {path.name: path.stat().st_size for path in append_only_files(self._run_directory)},
            "packages": self._packages,
        }
        return json.dumps(described, indent=1, default=plain_value).encode()

    def _written(self, pending: _Pending) -> bool:
        """Return whether every rank has written its files; after a failure there is nothing pending."""
        answers: Sequence[bool | str] = self._workers.call("checkpoint_written")
        if any(answer is False for answer in answers):
            return False
        failures = [f"rank {rank}: {each}" for rank, each in enumerate(answers) if isinstance(each, str)]
        if failures:
            self._fail(pending, failures[0])
        return not failures

    def _complete_in_thread(self, pending: _Pending) -> None:
        pending.completing = in_background(
            partial(_complete, pending, self._config.placement.train_workers), "checkpoint"
        )

    def _end(self, pending: _Pending, completing: Future[Path]) -> Path | None:
        if isinstance(error := completing.exception(), Exception):  # no failed save ends the run
            self._fail(pending, _reason(error))
            return None
        self._pending = None
        self._failed.clear()
        self.complete = pending.step
        if pending.replaces:
            self._latest = pending.step
            self._tidy()
        return completing.result()

    def _fail(self, pending: _Pending, reason: str) -> None:
        self._pending = None
        pending.given_up.set()
        if pending.completing is None or pending.completing.done():
            shutil.rmtree(pending.partial, ignore_errors=True)
        self._warn(pending.step, reason)

    def _warn(self, step: int, reason: str) -> None:
        self._failed.append(step)
        reason = reason.rstrip(".")
        logger.warning(
            "no checkpoint of step %d: %s. The run goes on; earlier checkpoints stay.", step, reason
        )


def _reason(error: Exception) -> str:
    """Return the reason of a failure, on one line."""
    if isinstance(error, CheckpointError):
        return str(error.args[0])
    return str(error) if isinstance(error, OSError) else repr(error)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _complete(pending: _Pending, world_size: int) -> Path:
    """Turn what the ranks have written into a checkpoint, and return it."""
    write_file(pending.partial / DRIVER, pending.driver)
    roles, files = _roles(pending.partial), dict(_describe(pending.partial, world_size))
    manifest = {"format": FORMAT, "world_size": world_size, "roles": roles, "files": files}
    write_file(pending.partial / MANIFEST, json.dumps(manifest, indent=1).encode())
    for role in roles:
        directory_to_disk(pending.partial / role)
    directory_to_disk(pending.partial)
    if pending.given_up.is_set():
        shutil.rmtree(pending.partial, ignore_errors=True)
        raise CheckpointError(f"{pending.partial} was given up.")
    target = pending.partial.with_name(_name(pending.step))
    publish(pending.partial, target)
    return target


def _is_whole(directory: Path, world_size: int) -> bool:
    """Return whether every rank has written its last file, a JSON object."""
    try:
        return all(
            isinstance(read_json(directory / name), dict)
            for name in rank_names(world_size, _roles(directory))
        )
    except (OSError, ValueError):
        return False


def _roles(directory: Path) -> list[str]:
    """Return the roles beside the policy; their directories are there before anything is written."""
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def _remove_old(directory: Path, keep: int, latest: int, best: str | None) -> None:
    """Remove all checkpoints up to that of a step but the latest ones and the best."""
    counted = [path for path in checkpoint_paths(directory) if path.name <= _name(latest)]
    for old in (path for path in counted[keep:] if path.name != best):
        try:
            remove(old)
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be removed: %s. The run goes on.", old, error)


def _describe(directory: Path, world_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name, bytes and SHA-256 of each file; those of tensors as the ranks found them while writing.

    :raises CheckpointError: A rank's file is missing, torn, or not as long as the rank wrote it.
    """
    written = list(rank_names(world_size, _roles(directory)))
    tensors = {name: _tensors(directory / name) for name in written}
    known: dict[str, Mapping[str, Any]] = {
        str(Path(name).with_name(each["file"])): each for name, each in tensors.items() if each
    }
    listed = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    # A network file system may list a directory as it was a while ago; what is opened by name is there.
    for name in sorted({*listed, *known, *written}):
        path = directory / name
        size = path.stat().st_size
        digest = known[name]["sha256"] if name in known else sha256(path)
        if name in known and known[name]["bytes"] != size:
            raise _not_as_written(
                f"{path} has {size} bytes, not the {known[name]['bytes']} that were written"
            )
        yield name, {"bytes": size, "sha256": digest}


def _tensors(path: Path) -> Mapping[str, Any]:
    """Return a rank's record of its tensor file; empty if it has none."""
    try:
        tensors = read_json(path).get("tensors") or {}
        return {key: tensors[key] for key in ("file", "bytes", "sha256")} if tensors else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_as_written(f"{path} cannot be read: {error!r}") from error


def _not_as_written(problem: str) -> CheckpointError:
    return CheckpointError(problem, hint="Every worker must see the run directory as the driver does.")


def remove_leftovers(directory: Path) -> None:
    """Remove leftovers of a run that was killed during a save or a removal."""
    for ending in ("partial", "removed", "replaced"):
        for path in directory.glob(f".step-*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def append_only_files(directory: Path) -> list[Path]:
    """Return the files of a run directory that only grow while the run goes on."""
    return sorted(path for path in directory.glob("*.jsonl") if not path.name.endswith(SUPERSEDED))


def installed_packages() -> dict[str, str]:
    """Return the versions of the packages that decide the bits of a step."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def export_hf(
    workers: WorkerGroup, target: Path, on_wait: Callable[[str], None] = logger.info, size: int = 0
) -> None:
    """Write the trained model as a Hugging Face directory, in place of one from before a resume.

    :param on_wait: Called with a line every few seconds, in another thread.
    :param size: About how many bytes it will have; 0 if that is not known.
    """
    is_there = target.exists()
    fresh = target.with_name(f".{target.name}.new") if is_there else target
    if is_there:
        shutil.rmtree(fresh, ignore_errors=True)
    with export_progress(fresh, on_wait, size):
        workers.call("save_hf", path=str(fresh))
    if is_there:
        publish(fresh, target)
