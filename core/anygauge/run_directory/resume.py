"""Config changes allowed on resume, and handling of output written after the checkpoint."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from anygauge.config import Config
from anygauge.config.deprecated_keys import renamed_keys
from anygauge.config.load import dump_config
from anygauge.config.rules.resume import CHANGEABLE
from anygauge.config.secret_values import masked
from anygauge.config.tree import flatten, is_inside
from anygauge.disk import free_name, parse_toml, remove_abandoned
from anygauge.health.record import HEALTH_FILE
from anygauge.observability.report.run_files import EXPORTS
from anygauge.run_directory.checkpoint_reader import Checkpoint, checkpoint_paths
from anygauge.run_directory.checkpoints import SUPERSEDED, append_only_files, installed_packages
from anygauge_hooks.errors import CheckpointError

__all__ = ["check_changes", "is_changed", "log_changes", "set_aside"]

logger = logging.getLogger(__name__)

HARMLESS = (
    *("run.name", "run.directory", "run.steps", "run.overwrite", "run.resume", "run.accept_changes"),
    *("run.trackers", "run.tracker_options", "run.report", "run.progress", "run.log_every"),
    *("run.timeout_s", "run.stop_on", "run.metrics"),
    *("hub", "eval", "save", "cluster", "data.cache", "debug", "health", "profile", "placement.launcher"),
    "train.replica_check_every",
    *("placement.start_timeout_s", "reward.num_workers", "reward.concurrency", "reward.timeout_s"),
    *("reward.memory_gib", "reward.max_failed_ratio", "rollout.client", "weight_sync", "train.lora.export"),
    "train.loss_memory_gib",
    *("rollout.gateway.host", "rollout.gateway.max_requests", "rollout.gateway.timeout_s"),
)
"""Sections and keys that change nothing of what a step computes, unless :func:`_effect` says so."""
ROUNDING = (
    *("train.micro_batch_tokens", "train.prefix_packing", "train.recompute", "train.fused_loss"),
    *("rollout.max_batch_tokens", "rollout.enforce_eager"),
    *("placement.train_workers", "placement.threads_per_worker", "placement.rollout_workers"),
    *("placement.colocated", "placement.offload"),
    *("run.deterministic", "train.parallel", "critic.parallel", "teacher.parallel"),
    *("rollout.sglang", "rollout.sglang_version", "rollout.groups", "rollout.external"),
)
"""Keys that change the order of sums: the steps are as good, but not the same to the bit."""
THIS_START = ("run.accept_changes", "run.overwrite", "run.resume")
"""Keys that are about one start of a run and not about the run."""
REQUIRED = ("run.name", "model.path", "data.train")
"""Keys without a default."""
ABSENT = "not set"
LONGEST_LINE = 2**24
"""Bytes."""


@dataclass(frozen=True, slots=True)
class _Change:
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def check_changes(old: Path, config: Config) -> None:
    """Look whether a config may continue a run.

    :param old: The resolved config that the run wrote.
    :raises CheckpointError: It differs in a key that would make it another run; lists all of them.
    """
    refused = [each for each in _changes(old, config) if not _may_change(each, config)]
    if refused:
        lines = "\n  ".join(str(each) for each in refused)
        raise CheckpointError(
            f"The config is not that of the run in {old.parent}:\n  {lines}",
            hint=_refusal_hint([each.key for each in refused]),
        )


def log_changes(old: Path, config: Config) -> None:
    """Say how a config differs from that of the run that it continues."""
    for change in _changes(old, config):
        if change.key not in THIS_START:
            logger.warning("changed with the resume: %s%s", change, _effect(change, config))


def _refusal_hint(keys: Sequence[str]) -> str:
    hint = "Restore these keys to continue it, or choose another --run.name."
    if not all(is_inside(key, CHANGEABLE) for key in keys):
        return hint
    accepted = sorted({"data" if key.startswith("data.") else key for key in keys})
    return f"{hint} To continue it with these changes: --run.accept_changes '{json.dumps(accepted)}'."


def is_changed(old: Path, config: Config) -> bool:
    """Return whether a config is another than that of the run that it continues."""
    return any(change.key not in THIS_START for change in _changes(old, config))


def _may_change(change: _Change, config: Config) -> bool:
    allowed = (*HARMLESS, *ROUNDING, *config.run.accept_changes)
    return is_inside(change.key, allowed) or _is_moved(change, config)


def _is_moved(change: _Change, config: Config) -> bool:
    """Return whether only the places of data files differ, of which a checkpoint knows the rows."""
    if change.key != "data.train" or config.data.source != "files":
        return False
    return bool(_without_places(change.old) == _without_places(change.new))


def _without_places(files: Any) -> Any:
    """Return data files with empty paths; a config that somebody edited may hold strings, or anything."""
    if not isinstance(files, list):
        return files
    tables = [{"path": each} if isinstance(each, str) else each for each in files]
    return [{**each, "path": ""} if isinstance(each, Mapping) else each for each in tables]


def _effect(change: _Change, config: Config) -> str:
    """Return what a change does to the steps that follow, as a clause to append."""
    if change.key == "run.steps" and config.train.lr_schedule == "cosine":
        return f"; the learning rate goes on along the cosine of a run of {change.new} steps"
    if change.key == "data.train" and not is_inside(change.key, config.run.accept_changes):
        return "; the rows must be those of the checkpoint, which is checked"
    return "; the bits may differ from here on" if is_inside(change.key, ROUNDING) else ""


def _changes(old: Path, config: Config) -> Iterator[_Change]:
    try:
        before = _leaves(old.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{old} cannot be read, so the run cannot be identified: {error}",
            hint="Restore the file, or start over with --overwrite.",
        ) from error
    after, usual = _leaves(dump_config(config)), _defaults(config)
    for key in sorted(before.keys() | after.keys()):
        now = after.get(key, ABSENT)
        # A run of an earlier version knew nothing of a key, and did what is the default of the key today.
        was = before.get(key, usual.get(key, ABSENT))
        if was != now:
            yield _Change(key, was, now)


def _leaves(text: str) -> dict[str, Any]:
    """Return the keys of a resolved config. Its secrets are masked: another one makes no other run."""
    return flatten(masked(renamed_keys(parse_toml(text), warn=False)[0]))


def _defaults(config: Config) -> Mapping[str, Any]:
    """Return every key that has a default, with it."""
    required = {"run": {"name": config.run.name}, "model": str(config.model.path), "data": {"train": []}}
    known = _leaves(dump_config(Config.model_validate(required)))
    return {key: value for key, value in known.items() if key not in REQUIRED}


def set_aside(directory: Path, checkpoint: Checkpoint | None) -> None:
    """Move output that was written after a checkpoint out of the way.

    The ends of the append-only files are moved to ``NAME.superseded.jsonl``, and later checkpoints, which are
    damaged, to ``NAME.damaged``. If the run begins again, its exports are moved to ``superseded-NAME``, and
    its health is deleted, since it follows from the metrics. Nothing else is lost but what a killed process
    had half written or removed.

    :param checkpoint: ``None`` for the beginning of the run.
    """
    remove_abandoned(directory)
    kept: Mapping[str, int] = checkpoint.files if checkpoint else {}
    for path in append_only_files(directory):
        _cut(path, kept.get(path.name, 0))
    if checkpoint is None:
        (directory / HEALTH_FILE).unlink(missing_ok=True)
        _rename_exports(directory)
    else:
        for later in checkpoint_paths(checkpoint.path.parent):
            if later.name > checkpoint.path.name:
                later.rename(free_name(later.with_name(f"{later.name}.damaged")))
        _warn_of_packages(checkpoint)


def _rename_exports(directory: Path) -> None:
    """Keep the exports of the earlier part under names that no reader takes for the model of the new one."""
    for path in [path for pattern in EXPORTS for path in directory.glob(pattern)]:
        # A prefix: with a suffix, hf-step-* would still match the name.
        kept = path.rename(free_name(path.with_name(f"superseded-{path.name}")))
        logger.warning("the model that an earlier part of the run exported to %s is now in %s", path, kept)


def _cut(path: Path, size: int) -> None:
    """Move what follows the lines in the first ``size`` bytes of a file to the file of superseded lines."""
    with path.open("rb") as stream:
        size = _whole_lines(stream, size)
        if size == path.stat().st_size:
            return
        stream.seek(size)
        with path.with_name(f"{path.stem}{SUPERSEDED}").open("ab") as superseded:
            shutil.copyfileobj(stream, superseded)
            superseded.flush()
            os.fsync(superseded.fileno())
    os.truncate(path, size)


def _whole_lines(stream: BinaryIO, size: int) -> int:
    """Return where the last line ends that is whole within the first ``size`` bytes."""
    first = max(0, size - LONGEST_LINE)
    stream.seek(first)
    return first + stream.read(size - first).rfind(b"\n") + 1


def _warn_of_packages(checkpoint: Checkpoint) -> None:
    now = installed_packages()
    for name, before in checkpoint.packages.items():
        if now.get(name) != before:
            logger.warning("the checkpoint was made with %s %s, this is %s", name, before, now.get(name))
