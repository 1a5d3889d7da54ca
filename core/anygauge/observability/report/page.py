"""HTML page of the report: one file that needs no other file, no network and, to be read, no script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import groupby
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from anygauge.observability.control_characters import visible
from anygauge.observability.report.catalog import SECTIONS, SFT_SECTIONS
from anygauge.observability.report.charts import draw_sections, sparkline
from anygauge.observability.report.health import health_box
from anygauge.observability.report.histograms import draw_histograms
from anygauge.observability.report.metrics_file import Series, page_data
from anygauge.observability.report.phases import draw_phases, phase_rows
from anygauge.observability.report.run_files import RunFiles
from anygauge.observability.report.scale import format_number
from anygauge.observability.report.summary import (
    badge,
    config_value,
    facts,
    run_name,
    standing,
    tiles,
    verdict,
)
from anygauge.observability.report.texts import config_tables, sample_steps
from anygauge.observability.report.timeline import draw_timeline
from anygauge.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["last_value", "page_json", "render", "render_page"]

_HERE = Path(__file__).parent
SCRIPTS = (
    "scale.js",
    "paths.js",
    "view.js",
    "chart.js",
    "pointer.js",
    "controls.js",
    "samples.js",
    "live.js",
)
LIVE_S = 30
"""Seconds after which the page of a running run reloads itself."""


def render_page(files: RunFiles, *, is_rewritten: bool = True) -> str:
    """Return the page of a run.

    :param is_rewritten: Whether a running run writes the page again, unless its config says otherwise.
    """
    created_at = datetime.now(UTC)
    steps = sample_steps(files.samples)
    tokens = {
        f"{step.step}/{index}": [list(each) for each in zip(*sample.tokens, strict=True)]
        for step in steps
        for index, sample in enumerate(step.samples)
        if sample.tokens
    }
    data = page_data(files.metrics)
    content = _content(files, created_at) | {"sample_steps": steps, "every": data["every"]}
    if is_rewritten and content["standing"].kind == "running" and config_value(files.config, "run", "report"):
        content["live"] = LIVE_S
    return render("page.html", content, data | {"tokens": tokens}, created_at)


def render(template: str, content: Mapping[str, Any], data: Any, created_at: datetime) -> str:
    """Return a page with its style, its script and the data that the script reads.

    :param template: Name of the file.
    """
    script = _script()
    return (
        _templates()
        .get_template(template)
        .render(
            {"live": None, **content},
            version=__version__,
            made=created_at.strftime("%Y-%m-%d %H:%M:%S UTC"),
            made_at=int(created_at.timestamp()),
            data=page_json(data),
            style=(_HERE / "page.css").read_text(encoding="utf-8"),
            script=script,
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


@cache
def _script() -> str:
    """Return the page's script: its files share one scope, and the names of nothing else."""
    parts = [(_HERE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    return '(() => {\n"use strict";\n' + "".join(parts) + "})();\n"


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "seconds": _seconds, "json_text": _json_text}
    return environment


def _content(files: RunFiles, created_at: datetime) -> dict[str, Any]:
    metrics = files.metrics
    heads = tiles(files)
    return {
        "name": run_name(files),
        "standing": standing(files),
        "badge": badge(files),
        "verdict": verdict(files, created_at),
        "health": health_box(files.health),
        "facts": facts(files, created_at),
        "tiles": heads,
        "columns": _columns(len(heads)),
        "missing": files.missing,
        "sections": draw_sections(metrics, SFT_SECTIONS if files.task == "sft" else SECTIONS),
        "has_samples": files.task != "sft" or bool(files.samples),
        "histograms": draw_histograms(files.distributions),
        "phases": draw_phases(metrics),
        "phase_rows": phase_rows(metrics),
        "timeline": draw_timeline(files.directory),
        "all_metrics": [_metric_row(name, series) for name, series in sorted(metrics.series.items())],
        "sparks": {tile.metric: sparkline(metrics.series[tile.metric]) for tile in heads},
        "last": {name: last_value(series) for name, series in metrics.series.items()},
        "recorded_steps": len(files.samples),
        "kernels": [_kernel_row(row) for row in _rows(files.capabilities, "kernels")],
        "hooks": list(_hook_rows(files.capabilities)),
        "plugin_errors": _problems(files.capabilities),
        "config": config_tables(files.config_text, files.config),
        "environment": files.environment,
        "log_tail": visible(files.log_tail),
    }


def page_json(value: Any) -> str:
    """Return a value as JSON that may stand in a script element: nothing in it ends the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _json_text(text: str) -> str:
    """Return the inside of a JSON string: HTML has no way to write some characters of a metric's name."""
    return page_json(text)[1:-1]


def _columns(tiles: int) -> int:
    """Return in how many columns tiles leave the fewest holes, at most six."""
    return tiles if tiles <= 6 else min((6, 5, 4), key=lambda columns: -tiles % columns)


def _seconds(value: float) -> str:
    return f"{format_number(value)} s" if value >= 1 else f"{format_number(1000 * value)} ms"


def last_value(series: Series) -> str:
    """Return the last number of a metric as text."""
    numbers = series.numbers
    return format_number(numbers[-1][1], 4) if numbers else "\N{EN DASH}"


def _metric_row(name: str, series: Series) -> dict[str, Any]:
    values = [value for _, value in series.numbers]
    shown = [values[0], values[-1], min(values), max(values)] if values else []
    return {
        "name": visible(name),
        "count": len(series.steps),
        "not_finite": len(series.steps) - len(values),
        "numbers": [format_number(value, 4) for value in shown],
        "spark": sparkline(series),
    }


def _hook_rows(capabilities: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each hook and who implements it."""
    for hook, group in groupby(_rows(capabilities, "hooks"), key=lambda row: str(row.get("hook"))):
        yield hook, [_implementer(row) for row in group if row.get("plugin")]


def _rows(capabilities: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = capabilities.get(name)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _problems(capabilities: Mapping[str, Any]) -> Mapping[str, Any]:
    errors = capabilities.get("plugin_errors")
    return errors if isinstance(errors, Mapping) else {}


def _kernel_row(row: Mapping[str, Any]) -> dict[str, Any]:
    dtypes = row.get("dtypes")
    return {
        **{name: str(row.get(name) or "") for name in ("op", "source", "location")},
        "dtypes": ", ".join(map(str, dtypes)) if isinstance(dtypes, list) else "",
        "package": _package(row),
        "place": "/".join(PurePath(str(row.get("location") or "")).parts[-3:]),
        "is_reference": bool(row.get("is_reference")),
    }


def _implementer(row: Mapping[str, Any]) -> str:
    package = _package(row)
    return f"{row['plugin']} ({package})" if package else str(row["plugin"])


def _package(row: Mapping[str, Any]) -> str:
    return f"{row['package']} {row.get('version') or ''}".strip() if row.get("package") else ""
