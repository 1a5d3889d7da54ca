"""``anygauge report``."""

from __future__ import annotations

import argparse

from anygauge.cli.arguments import local_path

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Write the HTML report of a run, which may be running, finished or failed, or compare runs."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "directories",
        metavar="RUN_DIR",
        nargs="+",
        type=local_path,
        help="such as runs/NAME; several are compared on one page",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=local_path,
        help="default: report.html in RUN_DIR; of several runs compare-A-B.html beside the first",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from anygauge.observability.report import write_comparison, write_report

    if len(args.directories) == 1:
        print(write_report(args.directories[0], args.out))
    else:
        print(write_comparison(args.directories, args.out))
    return 0
