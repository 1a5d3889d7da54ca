"""``anygauge doctor``: what runs on this machine, and how to fix what doesn't.

This process imports neither torch nor a plugin. What does runs in processes of its own with a deadline, so
that a vendor library that crashes or hangs is a row of the report.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Literal

from anygauge.cli.arguments import finite
from anygauge.extras import install_extra
from anygauge.version import __version__
from anygauge_hooks.errors import UnknownBackendError
from anygauge_hooks.types import HostCheck

__all__ = ["HELP", "BackendRow", "add_arguments", "read_media", "run"]

HELP = "Check which backends run on this host, and how to fix the others."

_READERS = (
    ("images, animations", "pillow", "pip install pillow"),
    ("mp4 and other video", "av", install_extra("media")),
    ("sound other than WAV", "soundfile", install_extra("media")),
)

Status = Literal["PASS", "FAIL", "NOT INSTALLED"]
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend."""

    name: str
    status: Status
    reason: str
    fix: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="also check the host for this backend: drivers, firmware, libraries",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout",
        type=finite,
        default=90.0,
        metavar="SECONDS",
        help="for all probes together (default 90)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; the status is 0 if the cpu backend passes, or all of the one that was asked for.

    :raises UnknownBackendError: No backend of that name is installed or published.
    """
    _check_backend(args.backend)
    report = examine(args.timeout)
    print(json.dumps(report, indent=2) if args.json else _rendered(report, args.backend))
    return 0 if _passes(report, args.backend) else 1


def _check_backend(name: str | None) -> None:
    """Refuse a backend that no row of the report can have, before the probes take their time."""
    from anygauge.plugins import published_backends

    known = sorted({*_entries(), *published_backends()})
    if name not in (None, *known):
        raise UnknownBackendError(
            f"Unknown backend {name!r}; known: {', '.join(known)}.", hint="Choose one of these."
        )


def _entries() -> list[str]:
    """Return the entry points of the installed backends, which have the names of these."""
    from anygauge.plugins import BACKENDS_GROUP

    return sorted({entry.name for entry in entry_points(group=BACKENDS_GROUP)})


def _passes(report: Mapping[str, Any], asked: str | None) -> bool:
    backend = report["backends"].get(asked or "cpu", {})
    checks = report["checks"].get(asked, ())
    return backend.get("status") == "PASS" and all(check["status"] != "FAIL" for check in checks)


def examine(timeout_s: float) -> dict[str, Any]:
    """Return all that is found, as JSON types.

    :param timeout_s: Deadline of all probes together.
    """
    from anygauge.cli.installed import read_installed
    from anygauge_hooks.resources import read_cpus, read_memory

    entries = _entries()
    answers = _run_probes([("plugins",), *(("backend", entry) for entry in entries)], timeout_s)
    loaded = answers.pop(0)
    rows = {row.name: row for row in _rows(entries, answers)}
    return {
        "anygauge": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": dataclasses.asdict(read_cpus()),
        "memory": dataclasses.asdict(read_memory()),
        "backends": {name: dataclasses.asdict(row) for name, row in rows.items()},
        "plugin_errors": {"loading": loaded["failed"]} if "failed" in loaded else loaded["errors"],
        "environment": loaded.get("environment", {}),
        "checks": loaded.get("checks", {}),
        "media": [dataclasses.asdict(row) for row in read_media()],
        "installed": [{**dataclasses.asdict(row), "fix": row.fix} for row in read_installed()],
    }


# -------------------------------------------------------------------------
# Probes
# -------------------------------------------------------------------------


def _run_probes(questions: Iterable[Sequence[str]], timeout_s: float) -> list[dict[str, Any]]:
    """Return the probes' answers; one that gives none is ``{"failed": reason}``."""
    command = [sys.executable, "-P", "-m", "anygauge.cli.probe"]
    children = [
        subprocess.Popen(
            [*command, *question],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for question in questions
    ]
    deadline = time.monotonic() + timeout_s
    try:
        return [_answer(child, deadline - time.monotonic(), timeout_s) for child in children]
    finally:
        for child in children:
            _end(child)


def _answer(child: subprocess.Popen[str], left_s: float, timeout_s: float) -> dict[str, Any]:
    try:
        output, errors = child.communicate(timeout=max(left_s, 0.01))
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {timeout_s:g} s"}
    if child.returncode < 0:
        return {"failed": f"its probe was killed by {signal.Signals(-child.returncode).name}"}
    if child.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        return {"failed": f"its probe exited with {child.returncode}: {last}"}
    answer: dict[str, Any] = json.loads(output)
    return answer


def _end(child: subprocess.Popen[str]) -> None:
    """Kill a probe and what it started, if it is still there."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _rows(entries: Sequence[str], answers: Sequence[Mapping[str, Any]]) -> Iterator[BackendRow]:
    from anygauge.plugins import install_hint, published_backends

    for entry, answer in zip(entries, answers, strict=True):
        if "failed" in answer:
            fix = f"Run `{sys.executable} -P -m anygauge.cli.probe backend {entry}` to see all of its output."
            yield BackendRow(entry, "FAIL", answer["failed"], fix)
        for row in answer.get("rows", ()):
            yield BackendRow(row["name"], "PASS" if row["ok"] else "FAIL", row["reason"], row["hint"])
    for name in published_backends():
        if name not in entries:
            yield BackendRow(name, "NOT INSTALLED", "its package is not installed", install_hint(name))


# -------------------------------------------------------------------------
# Text
# -------------------------------------------------------------------------


def _rendered(report: Mapping[str, Any], requested: str | None = None) -> str:
    parts = [
        *_host(report),
        "",
        "Backends",
        *_backends(report["backends"]),
        *(line for name in report["checks"] for line in _host_of(report, name, requested)),
        "",
        "Media",
        *_checks(report["media"]),
        "",
        "Installed set",
        *_installed(report["installed"]),
    ]
    if report["plugin_errors"]:
        parts += ["", "Plugins that failed to load"]
        parts += [f"  {name}: {error}" for name, error in sorted(report["plugin_errors"].items())]
    facts = {name: fact for name, fact in report["environment"].items() if name not in report}
    if facts:
        parts += ["", "Environment", *(f"  {name}: {fact}" for name, fact in facts.items())]
    return "\n".join(parts)


def _host(report: Mapping[str, Any]) -> Iterator[str]:
    cpus, memory = report["cpus"], report["memory"]
    yield f"anygauge {report['anygauge']}, Python {report['python']}, {report['platform']}"
    yield f"CPUs: {cpus['usable']:g} usable of {cpus['present']}{_because(cpus['reason'])}"
    total, available = memory["total"] / GIB, memory["available"] / GIB
    yield f"Memory: {total:.1f} GiB, {available:.1f} GiB available{_because(memory['reason'])}"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _backends(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for row in rows.values():
        yield from _row(row, row["reason"], 8, None if row["status"] == "PASS" else row["fix"])


def _host_of(report: Mapping[str, Any], name: str, requested: str | None) -> Iterator[str]:
    """Yield what a backend finds, if it was asked for, or if it is of use here or nearly."""
    checks = report["checks"][name]
    is_told = report["backends"].get(name, {}).get("status") == "PASS" or any(
        check["status"] == "FAIL" for check in checks
    )
    if not checks or not (requested == name if requested else is_told):
        return
    yield from ("", f"Host of {name}")
    yield from _checks(checks)


def _checks(checks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    width = max((len(check["name"]) for check in checks), default=0) + 2
    for check in checks:
        yield from _row(check, check["found"], width, check["fix"])


def _row(row: Mapping[str, Any], text: str, width: int, fix: str | None) -> Iterator[str]:
    yield f"  {row['status']:<14}{row['name']:<{width}}{text}"
    if fix:
        yield f"  {'':<14}{'':<{width}}fix: {fix}"


def _installed(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    shown = [row for row in rows if row["owner"].startswith("anygauge") and row["installed"] and row["ok"]]
    versions = {row["name"]: row["installed"] for row in shown}
    yield "  " + ", ".join(f"{name} {version}" for name, version in versions.items())
    wrong = [row for row in rows if not row["ok"]]
    for row in wrong:
        package = f"{row['name']} {row['installed']}" if row["installed"] else f"{row['name']} is missing"
        yield f"  CONFLICT  {package}; {row['owner']} needs {row['name']}{row['wanted']}"
        yield f"            fix: {row['fix']}"
    if not wrong:
        yield f"  all {len(rows)} requirements are met"


def read_media() -> list[HostCheck]:
    """Return the media formats that can be read, and what to install for the others. Imports nothing."""
    return [_media_row(*each) for each in _READERS]


def _media_row(name: str, distribution: str, fix: str) -> HostCheck:
    try:
        return HostCheck(name=name, status="PASS", found=f"{distribution} {version(distribution)}")
    except PackageNotFoundError:
        return HostCheck(name=name, status="NOT INSTALLED", found=f"{distribution} is not installed", fix=fix)
