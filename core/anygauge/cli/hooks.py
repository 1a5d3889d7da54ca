"""``anygauge hooks``: implementations of every hook, and ops with only a reference."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.cli.arguments import requested_backend

__all__ = ["HELP", "add_arguments", "columns", "run"]

HELP = "List who implements each hook and kernel operation, and every registered name."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
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
    print(json.dumps(report, indent=2, default=str) if args.json else _rendered(report))
    references = [
        f"{row['op']} ({', '.join(row['dtypes'])})" for row in report["kernels"] if row["is_reference"]
    ]
    if args.strict and references:
        names = ", ".join(references)
        print(f"anygauge: on {backend.name} the reference serves {names}", file=sys.stderr)
        return 1
    return 0


def _rendered(report: Mapping[str, Any]) -> str:
    kernels = [("OPERATION", "SERVED BY", "DTYPES", "PACKAGE", "WHERE"), *map(_kernel, report["kernels"])]
    hooks = [("HOOK", "PLUGIN", "PACKAGE", "WHERE"), *map(_hook, report["hooks"])]
    registered = [("KIND", "NAME", "PACKAGE", "WHERE"), *map(_registered, report["registered"])]
    lines = [f"Kernels on {report['backend']}", columns(kernels), "", "Hooks", columns(hooks)]
    lines += ["", "Registered names", columns(registered)]
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
