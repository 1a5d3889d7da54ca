"""The run directory: config, facts about the host, metrics, logs, checkpoints and exports of one run."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from anygauge.config import Config
from anygauge.config.data_files import split_slice
from anygauge.config.load import write_resolved
from anygauge.config.rules.file import INPUTS
from anygauge.disk import ABANDONED, free_name
from anygauge.failures import on_failure
from anygauge.health.record import HEALTH_FILE
from anygauge.observability.distributions import DISTRIBUTIONS_FILE
from anygauge.observability.jsonl import METRICS_FILE
from anygauge.observability.profiler import PROFILES
from anygauge.observability.report.run_files import ENVIRONMENT_FILE, EXPORTS
from anygauge.observability.timeline import TIMELINE_FILE
from anygauge.run_directory.checkpoint_reader import DIRECTORY as CHECKPOINTS
from anygauge.run_directory.checkpoint_reader import Checkpoint, checkpoint_paths, latest_checkpoint
from anygauge.run_directory.resume import check_changes, is_changed, log_changes, set_aside
from anygauge.wording import listed
from anygauge_hooks.errors import CheckpointError

__all__ = ["ReservedDirectory", "RunDirectory", "reserve_run_directory"]

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"
"""Held by the driver as long as it runs; says who that is."""
MARKS = (CONFIG_FILE, ENVIRONMENT_FILE)
"""Files that mark a run directory; a config alone may have been written by hand."""
LOGS = "logs"
LOGS_BEFORE = "logs.before"
"""Logs of the run that is about to be overwritten."""
OWN = (
    *(*MARKS, "config.until-step-*.toml", "capabilities.json", "run.json", "report.html", ".run.json.*"),
    *(".report.html.*", METRICS_FILE, "samples.jsonl", DISTRIBUTIONS_FILE, "*.superseded.jsonl", LOGS),
    *(f"{HEALTH_FILE}*", f".{HEALTH_FILE}.*"),  # with the health.jsonl of earlier versions
    *(TIMELINE_FILE, PROFILES),
    *(CHECKPOINTS, "dumps", *EXPORTS, "superseded-hf*", "tensorboard", "wandb", ".shared-*", *ABANDONED),
    f"{LOGS_BEFORE}*",
)
"""Names that a run and its trackers make in its directory, as patterns."""
STEP = re.compile(rb'"(?:perf|rollout|train)/step"')
"""In the metrics of a step, unlike those of an evaluation."""
AFTER_A_STEP = (HEALTH_FILE, *EXPORTS, "dumps")
"""Names, as patterns, that no run has before its first step is done."""
KEPT = (LOCK_FILE, INPUTS)
"""Names that say nothing of an earlier run: a program writes its data before the run takes the directory."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run that nobody else uses."""

    path: Path
    """Absolute."""
    config: Config
    environment: Mapping[str, str]
    continues: bool
    """Whether an earlier part of the run was here."""
    checkpoint: Checkpoint | None
    """Checkpoint to resume from; ``None`` to begin."""
    identity: tuple[int, int]
    """Device and inode."""

    def check(self) -> None:
        """Look whether the directory is still where the run writes to.

        :raises CheckpointError: It was moved or deleted.
        """
        try:
            is_there = _identity(self.path) == self.identity
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        if not is_there:
            raise CheckpointError(
                f"The run directory {self.path} was moved or deleted while the run was writing to it.",
                hint="Move it back and go on from its last checkpoint with --resume, or start over.",
            )

    def begin(self) -> None:
        """Say what changed, write the config, and set aside output that was written after the checkpoint.

        Called once the run is known to be able to go on: until then the directory is as it was.

        :raises CheckpointError: The disk refuses.
        """
        try:
            if self.continues:
                if not _took_no_step(self.path):
                    log_changes(self.path / CONFIG_FILE, self.config)
                set_aside(self.path, self.checkpoint)
                self._keep_old_config()
            # At every moment the directory has a whole config: it is what makes it a run's.
            fresh = self.path / f".{CONFIG_FILE}.new"
            write_resolved(self.config, fresh)
            facts = json.dumps(dict(self.environment), indent=2)
            (self.path / ENVIRONMENT_FILE).write_text(facts + "\n")
            fresh.replace(self.path / CONFIG_FILE)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _keep_old_config(self) -> None:
        current = self.path / CONFIG_FILE
        if is_changed(current, self.config):
            step = self.checkpoint.step if self.checkpoint else 0
            shutil.copyfile(current, free_name(self.path / f"config.until-step-{step}.toml"))


class ReservedDirectory:
    """A run's directory that nobody else uses, where processes may log, and all else is as it was.

    :param earlier: The directory as it was found.
    """

    def __init__(self, earlier: RunDirectory, undo: ExitStack) -> None:
        self.path = earlier.path
        self.checkpoint = earlier.checkpoint
        self._earlier = earlier
        self._undo = undo
        if earlier.config.run.overwrite:
            self._set_logs_aside()
        logs = self.path / LOGS
        if not logs.exists():
            undo.callback(shutil.rmtree, logs, ignore_errors=True)
            logs.mkdir()

    def _set_logs_aside(self) -> None:
        logs = self.path / LOGS
        if logs.is_dir():
            aside = free_name(self.path / LOGS_BEFORE)
            self._undo.callback(_rename_back, aside, logs)
            logs.rename(aside)

    def open(self, environment: Mapping[str, str]) -> RunDirectory:
        """Begin the run in it: an earlier one that is to be overwritten is deleted now.

        :param environment: Facts about the host, kept beside the config.
        :raises CheckpointError: The disk refuses.
        """
        opened = replace(self._earlier, environment=environment)
        self._undo.pop_all()
        try:
            if opened.config.run.overwrite:
                _clear(self.path)
                _clear_inputs(self.path, opened.config)
        except OSError as error:
            raise _unusable(self.path, error) from error
        if not opened.continues:
            opened.begin()
        return opened


@contextmanager
def reserve_run_directory(config: Config) -> Iterator[ReservedDirectory]:
    """Take the run's directory for as long as the block runs.

    An earlier run there is never touched, unless the config says ``run.overwrite`` or ``run.resume``, or it
    took no step, and the directory was opened. If it was not, it is left as it was found.

    :raises CheckpointError: It cannot be made; it holds something and the config says neither, or it is no
        earlier run; another process uses it; or the run in it cannot be continued with this config.
    """
    assert not (config.run.overwrite and config.run.resume), "the config was checked"
    directory = (config.run.directory / config.run.name).resolve()
    with ExitStack() as stack:
        undo = ExitStack()
        try:
            _refuse(directory, config)
            with on_failure(undo.close):
                _make(directory, undo)
                had_lock = (directory / LOCK_FILE).exists()
                stack.callback(os.close, _lock(directory))
                if not had_lock:  # it is this process's to remove, now that no other can hold it
                    undo.callback((directory / LOCK_FILE).unlink, missing_ok=True)
        except OSError as error:
            raise _unusable(directory, error) from error
        stack.enter_context(undo)  # with the lock
        _refuse(directory, config)
        earlier = _resumed(directory, config)
        try:
            reserved = ReservedDirectory(earlier, undo)
        except OSError as error:
            raise _unusable(directory, error) from error
        yield reserved


def _make(directory: Path, undo: ExitStack) -> None:
    """Make a directory, and have what is made of it removed again."""
    for parent in reversed([each for each in (directory, *directory.parents) if not each.exists()]):
        undo.callback(_remove_empty, parent)
        parent.mkdir(exist_ok=True)


def _rename_back(aside: Path, path: Path) -> None:
    with suppress(FileNotFoundError):  # the directory was moved meanwhile
        aside.rename(path)


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):  # somebody else has put something into it
        directory.rmdir()


def _resumed(directory: Path, config: Config) -> RunDirectory:
    """Return the directory with what is in it to go on with; changes nothing."""
    is_unstarted = not config.run.overwrite and _took_no_step(directory)
    continues = (directory / CONFIG_FILE).is_file() and (config.run.resume or is_unstarted)
    checkpoint = None
    if is_unstarted:
        logger.warning("the run in %s ended before its first step: it starts again", directory)
    elif continues:
        check_changes(directory / CONFIG_FILE, config)
        checkpoint = latest_checkpoint(directory)
        _check_steps(checkpoint, config)
    if config.run.resume and checkpoint is None and not is_unstarted:
        logger.warning("nothing to resume in %s: the run starts from its beginning", directory)
    return RunDirectory(directory, config, {}, continues, checkpoint, _identity(directory))


def _identity(directory: Path) -> tuple[int, int]:
    info = directory.stat()
    return info.st_dev, info.st_ino


def _check_steps(checkpoint: Checkpoint | None, config: Config) -> None:
    if checkpoint is not None and checkpoint.step > config.run.steps:
        raise CheckpointError(
            f"The run is at step {checkpoint.step}; run.steps = {config.run.steps}.",
            hint=f"Set run.steps to {checkpoint.step} or more, or choose another --run.name.",
        )


def _unusable(directory: Path, error: OSError) -> CheckpointError:
    """Return the error of a directory that cannot be made, or of a file in one that an earlier run made."""
    if (directory / CONFIG_FILE).is_file():
        return CheckpointError(
            f"The run in {directory} cannot be used: {error}.",
            hint="See to it that you may read and write what is named and that the disk has room, then start "
            "again; --resume continues the run.",
        )
    return CheckpointError(
        f"The run directory {directory} cannot be made: {error}.",
        hint="Name a directory that you may write to: --run.directory DIRECTORY.",
    )


def _refuse(directory: Path, config: Config) -> None:
    """Raise if the directory holds something that this run must leave alone."""
    if not directory.exists() or (directory.is_dir() and not _content(directory)):
        return
    if not (config.run.resume or config.run.overwrite):
        if _took_no_step(directory):
            return
        _refuse_if_used(directory)
        if not (directory / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"The run directory {directory} is not empty, and no run made it: it has no {CONFIG_FILE}.",
                hint="Choose another --run.name or --run.directory.",
            )
        raise CheckpointError(
            f"The run directory {directory} is not empty.",
            hint="Continue its run with --resume, delete that with --overwrite, or choose another "
            "--run.name.",
        )
    missing = [name for name in MARKS if not (directory / name).is_file()]
    if missing:
        refused = "cannot be resumed" if config.run.resume else "is not deleted"
        raise CheckpointError(
            f"{directory} was not created by a run, so it {refused}: it has no {missing[0]}.",
            hint="Choose another --run.name or --run.directory.",
        )
    if config.run.overwrite:
        _refuse_foreign(directory)


def _took_no_step(directory: Path) -> bool:
    """Return whether a run ended before its first step: it may start again with any config."""
    if not all((directory / name).is_file() for name in MARKS) or checkpoint_paths(directory / CHECKPOINTS):
        return False
    if any(any(directory.glob(name)) for name in AFTER_A_STEP):
        return False
    metrics = directory / METRICS_FILE
    if not metrics.exists():  # as without the tracker jsonl
        return True
    with metrics.open("rb") as lines:
        return not any(map(STEP.search, lines))


def _refuse_if_used(directory: Path) -> None:
    """Raise if a run is going on in the directory of a run."""
    if (directory / LOCK_FILE).is_file():
        os.close(_lock(directory))


def _refuse_foreign(directory: Path) -> None:
    """Raise if the directory of a run holds something that no run made: it is not ours to delete."""
    names = (path.name for path in _content(directory))
    foreign = sorted(name for name in names if not any(fnmatchcase(name, own) for own in OWN))
    if foreign:
        raise CheckpointError(
            f"{directory} contains files that no run wrote, so it is not deleted: {listed(foreign)}.",
            hint="Move that elsewhere, or choose another --run.name.",
        )


def _content(directory: Path) -> list[Path]:
    """Return what is in a directory, but for what a start leaves that was killed before its run began."""
    names = {path.name for path in directory.iterdir()}
    if names - {INPUTS} == {LOCK_FILE, LOGS}:
        return []
    return [directory / name for name in names.difference(KEPT)]


def _clear(directory: Path) -> None:
    for path in _content(directory):
        if path.name in (*MARKS, LOGS):
            # The marks are replaced by the new run's; until then they tell that what is left was a run's.
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _clear_inputs(directory: Path, config: Config) -> None:
    """Remove the data that a program wrote for an earlier run of this name."""
    sets = [config.data.train, config.eval.data, *(each.files for each in config.eval.datasets.values())]
    used = {Path(split_slice(file.path)[0]).name for files in sets for file in files}
    for path in (directory / INPUTS).glob("*.jsonl"):
        if path.name not in used:
            path.unlink()


def _lock(directory: Path) -> int:
    """Lock a run directory and return the descriptor that holds the lock; the kernel frees it at any end.

    :raises CheckpointError: Another process holds it.
    """
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 1000).decode(errors="replace").strip()
        os.close(descriptor)
        raise CheckpointError(
            f"The run directory {directory} is in use by {holder or 'another process'}.",
            hint="Wait for that run or end it, or choose another --run.name.",
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor
