"""``anygauge train``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from anygauge.cli.keys import print_keys
from anygauge.cli.plan import dry_run_plan

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Train a policy from a TOML config."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(takes_config_keys=True)
    parser.usage = (
        "anygauge train CONFIG.toml [--section.key value ...] [--backend NAME] [--resume | --overwrite] "
        "[--dry-run]"
    )
    parser.add_argument(
        "config", metavar="CONFIG.toml", nargs="?", help="its relative paths start at the current directory"
    )
    parser.add_argument("--backend", metavar="NAME", help="default: the only usable accelerator, else cpu")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run of this name from its last checkpoint; start it if there is none",
    )
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run of this name")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the config and print it resolved; works without the device",
    )
    parser.add_argument(
        "--no-file-check",
        dest="check_files",
        action="store_false",
        help="with --dry-run: do not check the files that the config names",
    )
    parser.add_argument("--keys", action="store_true", help="the same as `anygauge keys`")


def run(args: argparse.Namespace) -> int:
    """Load the config and train."""
    _check_usage(args)
    if args.keys:
        return print_keys(())
    from anygauge.api.start import load, train_loaded
    from anygauge.trainer.first_check import check_first

    loaded = load(
        args.config,
        _overrides(args),
        say=_say,
        backend=args.backend,
        is_dry=args.dry_run,
        check_files=args.check_files,
    )
    if args.dry_run:
        if args.check_files:
            check_first(loaded.config.config, loaded.plugins)
        for line in dry_run_plan(loaded, is_probed=args.backend is None):
            _say(line)
        _print_resolved(loaded.config.config, check_files=args.check_files)
        return 0
    from anygauge.distributed.garbage import freeze_living_objects

    train_loaded(loaded, say=_say, when_built=freeze_living_objects)
    return 0


def _print_resolved(config: Config, *, check_files: bool) -> None:
    """Print a config as TOML, and which names in it were not looked up."""
    from anygauge.config import dump_config
    from anygauge.hub import localized, unresolved

    for each in unresolved(localized(config, download=False)) if check_files else ():
        _say(f"not checked: {each.key} = {str(each)!r} is not in the cache; a run downloads it")
        if "did you mean" in (local := each.local_clause()):
            _say(f"             as a path, {local}")
    if check_files:
        _say("the first rows of the data files are checked; the others are as a run starts")
    print(dump_config(config), end="")


def _check_usage(args: argparse.Namespace) -> None:
    """Exit with status 2 if the options do not go together."""
    if args.resume and args.overwrite:
        args.parser.error("--resume goes on with an earlier run, --overwrite deletes it: give one of them")
    if args.keys and (args.config or args.overrides):
        args.parser.error("--keys takes no config")
    if not args.keys and args.config is None:
        args.parser.error("the following arguments are required: CONFIG.toml")
    if not args.check_files and not args.dry_run:
        args.parser.error("--no-file-check needs --dry-run: a run reads the files")


def _overrides(args: argparse.Namespace) -> list[str | tuple[str, Any]]:
    """Return the config keys of the command line.

    ``--resume`` and ``--overwrite`` are short for theirs, and take back the other one of the file.
    """
    if not (args.resume or args.overwrite):
        return list(args.overrides)
    return [*args.overrides, ("run.resume", args.resume), ("run.overwrite", args.overwrite)]


def _say(text: str) -> None:
    """Print to stderr: stdout is for what a dry run resolves."""
    print(text, file=sys.stderr, flush=True)
