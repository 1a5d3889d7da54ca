"""``anygauge hooks``: implementations of every hook, and ops with only a reference."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.cli.arguments import requested_backend

__all__ = ["HELP", "add_arguments", "columns", "run"]

TABLES = ("kernels", "hooks", "registered", "left_out")
NAMES = ("op", "source", "hook", "plugin", "kind", "name", "architectures", "package")
"""Fields of a row that words are looked for in."""
HELP = "List who implements each hook and kernel operation, and every registered name."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="*",
        help="only rows whose names contain all of these",
    )
    parser.add_argument("--backend", metavar="NAME", help="default: as `anygauge train` would choose")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--strict", action="store_true", help="exit with status 1 if an op uses the reference"
    )


def run(args: argparse.Namespace) -> int:
    """Print the capability table."""
    from anygauge.plugins import load_plugins
    from anygauge.run_directory.capabilities import capabilities

    plugins = load_plugins()
    backend = requested_backend(plugins, args.backend)
    report = capabilities(plugins, backend)
    known = {name for table in TABLES for row in report[table] for name in _names(row)}
    report |= {table: [row for row in report[table] if _has(row, args.words)] for table in TABLES}
    if not any(report[table] for table in TABLES):
        print(_nothing(args.words, known))
        return 1
    print(json.dumps(report, indent=2, default=str) if args.json else _rendered(report))
    references = [
        f"{row['op']} ({', '.join(row['dtypes'])})" for row in report["kernels"] if row["is_reference"]
    ]
    if args.strict and references:
        names = ", ".join(references)
        print(f"anygauge: on {backend.name} the reference serves {names}", file=sys.stderr)
        return 1
    return 0


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    for field in NAMES:
        value = row.get(field) or ()
        yield from [value] if isinstance(value, str) else value


def _has(row: Mapping[str, Any], words: Sequence[str]) -> bool:
    text = " ".join(_names(row)).lower()
    return all(word.lower() in text for word in words)


def _nothing(words: Sequence[str], names: Collection[str]) -> str:
    """Return that no row has all words, and the name that one may mean."""
    close = [each for word in words for each in difflib.get_close_matches(word, sorted(names), n=1)]
    meant = f"; did you mean {' or '.join(close)}?" if close else "."
    return f"Nothing has {' and '.join(words)} in its names{meant}"


def _rendered(report: Mapping[str, Any]) -> str:
    kernels = [("OPERATION", "SERVED BY", "DTYPES", "PACKAGE", "WHERE"), *map(_kernel, report["kernels"])]
    hooks = [("HOOK", "PLUGIN", "PACKAGE", "WHERE"), *map(_hook, report["hooks"])]
    registered = [("KIND", "NAME", "PACKAGE", "WHERE"), *map(_registered, report["registered"])]
    tables = (
        (f"Kernels on {report['backend']}", kernels),
        ("Hooks", hooks),
        ("Registered names", registered),
    )
    lines = [line for title, rows in tables if len(rows) > 1 for line in (title, columns(rows), "")][:-1]
    for kernel in report["kernels"]:
        for dtype, (relative, absolute) in kernel["tolerance"].items():
            declared = f"{relative:g} relative, {absolute:g} absolute in {dtype}"
            reason = kernel["tolerance_reason"] or "no reason given"
            lines += ["", f"Tolerance: {kernel['source']} for {kernel['op']}: {declared}; {reason}"]
    for kernel in report["left_out"]:
        missing = ", ".join(kernel["missing"])
        lines += ["", f"Left out: {kernel['source']} for {kernel['op']}; not installed: {missing}"]
    for name, backends in sorted(report["unknown_backends"].items()):
        lines += ["", f"Plugin {name!r} is for unknown backends: {', '.join(backends)}"]
    for name, error in sorted(report["plugin_errors"].items()):
        lines += ["", f"Plugin {name!r} failed to load: {error}"]
    return "\n".join(lines)


def _kernel(row: Mapping[str, Any]) -> Sequence[str]:
    served = f"reference ({row['source']})" if row["is_reference"] else row["source"]
    return row["op"], served, ", ".join(row["dtypes"]), _package(row), _short(row["location"])


def _hook(row: Mapping[str, Any]) -> Sequence[str]:
    return row["hook"], row["plugin"] or "-", _package(row), _short(row["location"])


def _registered(row: Mapping[str, Any]) -> Sequence[str]:
    architectures = f" ({', '.join(row['architectures'])})" if row["architectures"] else ""
    return row["kind"], f"{row['name']}{architectures}", _package(row), _short(row["location"])


def _short(location: str | None) -> str:
    """Return a location relative to the current directory if it is below it."""
    if not location:
        return "-"
    path = Path(location)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _package(row: Mapping[str, Any]) -> str:
    return f"{row['package']} {row['version']}" if row["package"] else "-"


def columns(rows: Sequence[Sequence[str]], indent: int = 2) -> str:
    """Return rows with their cells aligned; the last column is not padded.

    >>> print(columns([("op", "source"), ("rms_norm", "torch")], indent=0))
    op        source
    rms_norm  torch
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{' ' * indent}{line}".rstrip() for line in lines)
