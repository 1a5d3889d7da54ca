"""``anygauge eval``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from anygauge.cli.arguments import local_path
from anygauge.distributed.garbage import freeze_living_objects
from anygauge.observability.control_characters import visible
from anygauge_hooks.errors import ConfigError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Evaluate a model or a checkpoint on the data sets of a config."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(takes_config_keys=True)
    parser.usage = (
        "anygauge eval CONFIG.toml [--checkpoint DIR] [--section.key value ...] [--backend NAME] [--out FILE]"
    )
    parser.add_argument(
        "config", metavar="CONFIG.toml", help="config with an [eval] table, such as config.toml of a run"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=local_path,
        help="a Hugging Face directory, a checkpoint of a run, or a run for its latest; default: model.path",
    )
    parser.add_argument("--backend", metavar="NAME", help="default: the only usable accelerator, else cpu")
    parser.add_argument(
        "--out", metavar="FILE", type=local_path, help="write what was evaluated and its metrics as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate and print a table."""
    from anygauge.api.start import evaluate_loaded, load_evaluation

    if args.out is not None:
        _check_target(args.out)
    evaluation = load_evaluation(
        args.config, args.overrides, say=_say, backend=args.backend, checkpoint=args.checkpoint
    )
    metrics = evaluate_loaded(evaluation, when_built=freeze_living_objects)
    print_table(metrics)
    if args.out is not None:
        _write(args.out, {evaluation.kind: str(evaluation.path), **metrics})
    return 0


def _say(text: str) -> None:
    """Print to stderr: stdout is for the table."""
    print(text, file=sys.stderr, flush=True)


def _check_target(path: Path) -> None:
    """Refuse a file that cannot be written, before the work."""
    where = path if path.exists() else path.parent
    if path.is_dir():
        problem = "it is a directory"
    elif not path.parent.is_dir():
        problem = f"there is no directory {path.parent}"
    elif not os.access(where, os.W_OK):
        problem = f"{where} is not writable"
    else:
        return
    raise _unwritable(path, problem)


def _write(path: Path, results: Mapping[str, float | str]) -> None:
    sys.stdout.flush()  # what follows may fail, and the table has the result
    try:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, str(error)) from error


def _unwritable(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"The metrics cannot be written to {path}: {problem}.",
        hint="Name a file in a directory that exists and that you may write to: --out FILE.",
    )


def print_table(metrics: Mapping[str, float]) -> None:
    """Print one line for each metric."""
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(visible(f"{name:<{width}}  {value:.6g}"))
