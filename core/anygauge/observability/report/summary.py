"""Head of a report: status, description and the most important numbers of a run."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import PurePath
from statistics import fmean, median
from typing import Any, Literal

from anygauge.observability.control_characters import visible
from anygauge.observability.report.catalog import eval_losses, eval_means
from anygauge.observability.report.metrics_file import Series
from anygauge.observability.report.run_files import RunFiles
from anygauge.observability.report.scale import format_number
from anygauge.wording import counted

__all__ = [
    "Standing",
    "Tile",
    "badge",
    "config_value",
    "facts",
    "run_name",
    "spell_duration",
    "standing",
    "tiles",
    "verdict",
]

Kind = Literal["finished", "running", "failed", "stopped", "unknown"]

_OUTCOMES: Mapping[str, Kind] = {"finished": "finished", "failed": "failed", "interrupted": "stopped"}
"""Kind of standing for each outcome in ``run.json``."""
_LAST = 10
"""Steps over which a noisy metric's final value is the mean."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands."""

    kind: Kind
    text: str
    step: int
    total: int | None
    error: str = ""
    """Error that ended the run."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number with its name and what it is compared to."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    metric: str = ""
    """Metric whose curve is drawn under the number."""


def standing(files: RunFiles) -> Standing:
    """Return how the run stands, from its record and its metrics."""
    part = _last_part(files)
    total = _total(files)
    step = max(files.metrics.last_step, part.get("step") or 0)
    kind, text = _kind(part, done=total is not None and step >= total)
    return Standing(kind, text, step, total, str(part.get("error") or ""))


def _kind(part: Mapping[str, Any], *, done: bool) -> tuple[Kind, str]:
    """Return how the last part of a run stands, and how the page says it."""
    if part.get("outcome") in _OUTCOMES:
        return _OUTCOMES[part["outcome"]], str(part["outcome"])
    if not part:
        return ("finished", "all steps done") if done else ("unknown", "not known to have ended")
    alive = _is_alive(part)
    if alive is None:
        return "unknown", f"last heard of on {part.get('host')}"
    return ("running", "running") if alive else ("stopped", "killed")


def _last_part(files: RunFiles) -> Mapping[str, Any]:
    parts: Sequence[Mapping[str, Any]] = (files.record or {}).get("parts", ())
    return parts[-1] if parts else {}


def _total(files: RunFiles) -> int | None:
    run = files.config.get("run")
    total = (files.record or {}).get("total_steps") or (
        run.get("steps") if isinstance(run, Mapping) else None
    )
    return total if isinstance(total, int) else None


def _is_alive(part: Mapping[str, Any]) -> bool | None:
    """Return whether the process of a part is still there; ``None`` if it is on another host."""
    import psutil

    if part.get("host") != socket.gethostname():
        return None
    started = _time(part.get("started"))
    try:
        process = psutil.Process(int(part["pid"]))
        # A process that is younger than the part has only got its number.
        return started is None or process.create_time() <= started.timestamp() + 1
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def badge(files: RunFiles) -> tuple[str, str]:
    """Return kind and text of the badge beside a run's name; a run with warnings is never green."""
    now_at, firing = standing(files), files.health.firing if files.health else ()
    if not firing:
        return now_at.kind, now_at.text
    return "warned", f"{now_at.text}, {counted(len(firing), 'warning')}"


def facts(files: RunFiles, now: datetime) -> list[tuple[str, str]]:
    """Return names and values of the run's facts."""
    config = files.config
    values = {
        "model": _short(config_value(config, "model", "path")),
        "data": ", ".join(_files(config_value(config, "data", "train"))),
        "reward": config_value(config, "reward", "function") or " + ".join(_reward_parts(config)),
        "algorithm": config_value(config, "algorithm", "advantage"),
        "task": config_value(config, "run", "task"),
        "backend": _backend(files),
        "workers": config_value(config, "placement", "train_workers")
        or config_value(config, "placement", "num_workers"),
        "started": _started(files),
        "took": _duration_text(files, now),
        "parts": _parts(files),
    }
    if values["task"] == "sft":
        values["reward"] = values["algorithm"] = None
    return [(name, str(value)) for name, value in values.items() if value]


def _backend(files: RunFiles) -> str | None:
    """Return its name, and what the host that began the run told of its devices."""
    name = (files.record or {}).get("backend") or files.capabilities.get("backend")
    devices = files.environment.get(name) if isinstance(name, str) else None
    return f"{name} ({devices})" if devices else name


def config_value(config: Mapping[str, Any], section: str, key: str) -> Any:
    """Return the value of a key; ``None`` if it is not there or ``"none"``."""
    table = config.get(section)
    value = table.get(key) if isinstance(table, Mapping) else None
    return None if value == "none" else value


def _reward_parts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = config_value(config, "reward", "parts")
    return parts if isinstance(parts, Mapping) else {}


def _files(files: Any) -> Iterator[str]:
    for file in files if isinstance(files, list) else ():
        table = file if isinstance(file, Mapping) else {"path": file}
        name = table.get("name")
        yield str(name) if name and name != "none" else PurePath(str(table.get("path", "?"))).name


def _short(path: Any) -> str:
    """Return the end of a long path, or a hub name as it is."""
    parts = PurePath(str(path or "")).parts
    return "/".join(parts[-2:]) if len(parts) > 2 else str(path or "")


def _started(files: RunFiles) -> str:
    parts = (files.record or {}).get("parts", ())
    started = _time(parts[0].get("started")) if parts else None
    return started.strftime("%Y-%m-%d %H:%M UTC") if started else ""


def _parts(files: RunFiles) -> str:
    parts = (files.record or {}).get("parts", ())
    if len(parts) < 2:
        return ""
    resumed = ", ".join(str(part.get("from_step", "?")) for part in parts[1:])
    return f"{len(parts)}; resumed after step {resumed}"


def _duration_text(files: RunFiles, now: datetime) -> str:
    """Return the time of all parts together; of one that was killed and resumed nobody knows it."""
    seconds, unknown = 0.0, False
    for part in (files.record or {}).get("parts", ()):
        started, ended = _time(part.get("started")), _time(part.get("ended"))
        if ended is None and part is _last_part(files):
            ended = now if _is_alive(part) else _last_sign(files)
        if started is None or ended is None:
            unknown = True
        else:
            seconds += max((ended - started).total_seconds(), 0.0)
    return f"{'at least ' if unknown else ''}{spell_duration(seconds)}" if seconds else ""


def _last_sign(files: RunFiles) -> datetime | None:
    return None if files.last_sign is None else datetime.fromtimestamp(files.last_sign, UTC)


def _time(text: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def spell_duration(seconds: float) -> str:
    """Return a duration as ``2 d 3 h``, ``2 h 05 min``, ``2 min 05 s`` or ``5 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


# -------------------------------------------------------------------------
# Verdict and numbers
# -------------------------------------------------------------------------


def run_name(files: RunFiles) -> str:
    """Return the name of a run."""
    name = config_value(files.config, "run", "name") or (files.record or {}).get("name")
    return visible(str(name or files.directory.resolve().name))


def verdict(files: RunFiles, now: datetime) -> list[str]:
    """Return what came of a run, in sentences: how far it got, what was learned, and its health."""
    now_at = standing(files)
    steps = f"step {now_at.step}" + (f" of {now_at.total}" if now_at.total else "")
    took = f" in {duration}" if (duration := _duration_text(files, now)) else ""
    left = f", about {seconds} left" if (seconds := _left(files, now_at, now)) else ""
    all_steps = f"all {now_at.total} steps" if now_at.step == now_at.total else f"at {steps}"
    said = {
        "finished": f"Finished {all_steps}{took}.",
        "running": f"Running: {steps}{left}.",
        "failed": f"Failed after {steps}{took}.",
        "stopped": f"{now_at.text.capitalize()} after {steps}{took}.",
        "unknown": f"At {steps}, {now_at.text}.",
    }
    return [said[now_at.kind], *_outcomes(files.metrics.series), *_health(files)]


def _left(files: RunFiles, now_at: Standing, now: datetime) -> str:
    """Return how long the rest of a running run takes, at the mean speed of this part of it."""
    part = _last_part(files)
    started, done = _time(part.get("started")), now_at.step - int(part.get("from_step") or 0)
    if now_at.total is None or started is None or done <= 0:
        return ""
    return spell_duration((now - started).total_seconds() / done * max(now_at.total - now_at.step, 0))


def _outcomes(series: Mapping[str, Series]) -> Iterator[str]:
    """Yield how each evaluation changed; without any, how the reward or the loss of training did."""
    losses = [(name, f"Evaluation loss of {label}", min) for name, label in eval_losses(series)]
    means = [(name, f"Evaluation of {label}", max) for name, label in eval_means(series)]
    training = [("rollout/raw_reward", "Reward", max), ("train/loss", "Loss", min)]
    evaluated = [each for each in (*means, *losses) if series[each[0]].numbers]
    recorded = [each for each in training if each[0] in series and series[each[0]].numbers][:1]
    for name, label, better in evaluated or recorded:
        points = series[name].numbers
        first, last = (points[0][1], points[-1][1]) if evaluated else _ends(points)
        if len(points) == 1 or format_number(first) == format_number(last):
            yield f"{label}: {format_number(last)}."
            continue
        verb = "rose" if last > first else "fell"
        text = f"{label} {verb} from {format_number(first)} to {format_number(last)}"
        step, best = better(reversed(points), key=lambda point: point[1])
        is_last = not evaluated or format_number(best) == format_number(last)
        yield f"{text}." if is_last else f"{text}; its best was {format_number(best)} at step {step}."


def _health(files: RunFiles) -> Iterator[str]:
    if files.health is None:
        return
    firing = [rule.rule for rule in files.health.firing]
    names = ", ".join(firing)
    yield f"Health: {counted(len(firing), 'warning')} ({names})." if firing else "Health: no warning."


def tiles(files: RunFiles) -> list[Tile]:
    """Return the numbers that head the page; those whose metrics were recorded."""
    series = files.metrics.series
    listed = [
        _course(series, "rollout/raw_reward", "Reward"),
        _course(series, "train/loss", "Loss") if "rollout/raw_reward" not in series else None,
        *(_evaluation(series, name, f"Evaluation loss: {label}") for name, label in eval_losses(series)),
        *(_evaluation(series, name, f"Evaluation: {label}") for name, label in eval_means(series)),
        _difference(files),
        _course(series, "rollout/response_len/mean", "Response length", "tokens"),
        _typical(series, "perf/tokens_per_s", "Throughput", "tokens/s"),
        _typical(series, "perf/step_time", "Step time", "s"),
        _peak(series, "perf/device_memory_gib", "Peak device memory"),
    ]
    return [tile for tile in listed if tile is not None]


def _ends(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the means of the first and of the last few of at least one value."""
    count = _few(points)
    return fmean(v for _, v in points[:count]), fmean(v for _, v in points[-count:])


def _few(points: Sequence[tuple[int, float]]) -> int:
    return max(1, min(_LAST, len(points) // 4))


def _course(series: Mapping[str, Series], name: str, label: str, unit: str = "") -> Tile | None:
    """Return where a noisy metric ended, and where it began."""
    points = series[name].numbers if name in series else []
    if not points:
        return None
    first, last = _ends(points)
    over = f", means over {count} steps" if (count := _few(points)) > 1 else ""
    return Tile(label, format_number(last), unit, f"from {format_number(first)}{over}", name)


def _difference(files: RunFiles) -> Tile | None:
    """Return how far trainer and engine are apart, with the limit of its health rule."""
    name = "train/train_rollout_logprob_abs_diff"
    tile = _course(files.metrics.series, name, "Log-prob difference", "nats")
    rules = files.health.rules if files.health else ()
    limit = next((rule.limit for rule in rules if rule.rule == "logprob_abs_diff"), None)
    if tile is None or limit is None:
        return tile
    return replace(tile, note=f"trainer to engine, limit {format_number(limit)}")


def _evaluation(series: Mapping[str, Series], name: str, label: str) -> Tile | None:
    points = series[name].numbers
    if not points:
        return None
    (first_step, first), (last_step, last) = points[0], points[-1]
    note = f"from {format_number(first)} at step {first_step}" if len(points) > 1 else f"at step {last_step}"
    return Tile(label, format_number(last), "", note, name)


def _typical(series: Mapping[str, Series], name: str, label: str, unit: str) -> Tile | None:
    values = [value for _, value in series[name].numbers] if name in series else []
    if not values:
        return None
    return Tile(label, format_number(median(values)), unit, f"median of {len(values)} steps", name)


def _peak(series: Mapping[str, Series], name: str, label: str) -> Tile | None:
    points = series[name].numbers if name in series else []
    if not points:
        return None
    step, value = max(points, key=lambda point: point[1])
    return Tile(label, format_number(value), "GiB", f"at step {step}", name)
