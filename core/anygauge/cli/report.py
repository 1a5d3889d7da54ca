"""``anygauge report``."""

from __future__ import annotations

import argparse

from anygauge.cli.arguments import local_path

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Write the HTML report of a run, which may be running, finished or failed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("directory", metavar="RUN_DIR", type=local_path, help="such as runs/NAME")
    parser.add_argument("--out", metavar="FILE", type=local_path, help="default: report.html in RUN_DIR")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from anygauge.observability.report import write_report

    print(write_report(args.directory, args.out))
    return 0
