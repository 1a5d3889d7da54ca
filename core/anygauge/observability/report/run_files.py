"""Read the files of a run directory. Any of them may be missing, cut short or still growing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anygauge.disk import parse_toml, read_json
from anygauge.health.record import HEALTH_FILE, Health, read_health
from anygauge.observability.distributions import DISTRIBUTIONS_FILE
from anygauge.observability.jsonl import METRICS_FILE
from anygauge.observability.report.metrics_file import Metrics, read_metrics
from anygauge.observability.report.run_record import RECORD_FILE, read_record
from anygauge.observability.samples import SAMPLES_FILE
from anygauge.strict_json import parse_json
from anygauge_hooks.errors import CheckpointError

__all__ = [
    "CAPABILITIES_FILE",
    "CONFIG_FILE",
    "ENVIRONMENT_FILE",
    "EXPORTS",
    "RunFiles",
    "check_run",
    "last_export",
    "read_run",
]

CONFIG_FILE = "config.toml"
ENVIRONMENT_FILE = "environment.json"
CAPABILITIES_FILE = "capabilities.json"
DRIVER_LOG = "logs/driver.log"
EXPORTS = ("hf", "hf-step-*")
"""Names of the exported models, as patterns."""

_LOG_LINES = 30
_LOG_BYTES = 16_384


@dataclass(slots=True)
class RunFiles:
    """The files of a run, as far as they are there and can be read."""

    directory: Path
    missing: list[str] = field(default_factory=list)
    """A sentence for each file that is not there or cannot be read."""
    metrics: Metrics = field(default_factory=lambda: Metrics({}))
    samples: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Samples by step, ascending."""
    distributions: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Distributions by step, ascending."""
    health: Health | None = None
    """State of the health rules; ``None`` before the first step."""
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] | None = None
    log_tail: str = ""
    last_sign: float | None = None
    """When the run last wrote metrics or its log, in seconds since the epoch."""

    @property
    def task(self) -> str:
        """``rl`` or ``sft``."""
        run = self.config.get("run")
        return str(run.get("task", "rl")) if isinstance(run, Mapping) else "rl"


def read_run(directory: Path) -> RunFiles:
    """Read a run directory.

    :raises CheckpointError: It is none.
    """
    check_run(directory)
    files = RunFiles(directory)
    _read_config(files)
    files.environment = _read_object(files, ENVIRONMENT_FILE)
    files.capabilities = _read_object(files, CAPABILITIES_FILE)
    files.record = read_record(directory)
    if files.record is None:
        files.missing.append(
            f"There is no {RECORD_FILE}: when the run began, and whether it goes on, is unknown."
        )
    _read_metrics(files)
    _read_samples(files)
    files.distributions = _read_steps(files, DISTRIBUTIONS_FILE, dict)
    _read_health(files)
    files.log_tail = _tail(directory / DRIVER_LOG)
    written = [path for name in (METRICS_FILE, DRIVER_LOG) if (path := directory / name).is_file()]
    files.last_sign = max((path.stat().st_mtime for path in written), default=None)
    return files


def check_run(directory: Path) -> None:
    """Raise if a directory is not that of a run.

    :raises CheckpointError: It is none; names those that are near.
    """
    marks = (CONFIG_FILE, METRICS_FILE, RECORD_FILE)
    if any((directory / name).is_file() for name in marks):
        return
    if not directory.is_dir():
        reason = "it is a file" if directory.exists() else "it does not exist"
        raise CheckpointError(
            f"{directory} is not a run directory: {reason}.", hint=_neighbors(directory.parent)
        )
    raise CheckpointError(
        f"{directory} is not a run directory: it has neither {', '.join(marks[:-1])} nor {marks[-1]}.",
        hint=_neighbors(directory),
    )


def last_export(directory: Path) -> Path | None:
    """Return the latest exported model of a run, a Hugging Face directory; ``None`` if there is none."""
    configs = [path for name in EXPORTS for path in directory.glob(f"{name}/config.json")]
    latest = max(configs, key=lambda path: path.stat().st_mtime, default=None)
    return None if latest is None else latest.parent


def _neighbors(directory: Path) -> str:
    """Return what to name instead: the run directories below one, latest first."""
    runs = [path.parent for path in directory.glob(f"*/{CONFIG_FILE}")] if directory.is_dir() else []
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    names = ", ".join(str(path) for path in runs[:5])
    return f"Name one of these: {names}." if runs else "Name the directory of a run, such as runs/NAME."


def _read_config(files: RunFiles) -> None:
    path = files.directory / CONFIG_FILE
    try:
        files.config_text = path.read_text(encoding="utf-8", errors="replace")
        files.config = parse_toml(files.config_text)
    except OSError:
        files.missing.append(f"There is no {CONFIG_FILE}.")
    except ValueError as error:
        files.missing.append(f"{CONFIG_FILE} cannot be read: {error}.")


def _read_object(files: RunFiles, name: str) -> Mapping[str, Any]:
    try:
        value = read_json(files.directory / name)
    except OSError:
        files.missing.append(f"There is no {name}.")
        return {}
    except ValueError as error:
        files.missing.append(f"{name} cannot be read: {error}.")
        return {}
    if not isinstance(value, dict):
        files.missing.append(f"{name} cannot be read: it holds no object.")
        return {}
    return value


def _read_metrics(files: RunFiles) -> None:
    path = files.directory / METRICS_FILE
    if not path.is_file():
        files.missing.append(f"There is no {METRICS_FILE}: no step has ended yet.")
        return
    files.metrics = read_metrics(path)
    if files.metrics.broken_lines:
        files.missing.append(f"{METRICS_FILE}: {files.metrics.broken_lines} lines cannot be read.")
    if not files.metrics.series:
        files.missing.append(f"{METRICS_FILE} has no metrics yet.")


def _read_samples(files: RunFiles) -> None:
    if not (files.directory / SAMPLES_FILE).is_file() and files.task != "sft":
        files.missing.append(f"There is no {SAMPLES_FILE}.")
    files.samples = _read_steps(files, SAMPLES_FILE, lambda row: [dict(each) for each in row["samples"]])


def _read_steps(files: RunFiles, name: str, read: Callable[[Mapping[str, Any]], Any]) -> dict[int, Any]:
    """Return what is read from each line of a file by its step, ascending; nothing where there is no file."""
    steps: dict[int, Any] = {}
    broken = 0
    path = files.directory / name
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            row = parse_json(line or b"null", strict=False)
            if row is not None:
                steps[int(row["step"])] = read(row)
        except (ValueError, TypeError, KeyError, OverflowError):
            broken += 1
    if broken:
        files.missing.append(f"{name}: {broken} lines cannot be read.")
    return dict(sorted(steps.items()))


def _read_health(files: RunFiles) -> None:
    try:
        files.health = read_health(files.directory)
    except (OSError, ValueError):
        files.missing.append(f"{HEALTH_FILE} cannot be read.")


def _tail(path: Path) -> str:
    """Return the last lines of a log, or an empty text where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LOG_LINES:])
