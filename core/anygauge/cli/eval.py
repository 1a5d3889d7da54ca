"""``anygauge eval``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Evaluate a model or a checkpoint on the data sets of a config."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; those of the config tree are not among them."""
    parser.usage = (
        "anygauge eval CONFIG.toml [--checkpoint DIR] [--section.key value ...] [--backend NAME] [--out FILE]"
    )
    parser.add_argument(
        "config", metavar="CONFIG.toml", help="[eval] says on what and how; config.toml of a run serves too"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="a Hugging Face directory, a checkpoint of a run, or a run for its latest; default: model.path",
    )
    parser.add_argument("--backend", metavar="NAME", help="default: the only usable accelerator, else cpu")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the metrics as JSON too")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print a table."""
    from anygauge.config import load_config
    from anygauge.plugins import load_plugins, select_backend
    from anygauge.trainer.evaluation_run import evaluate_checkpoint

    # `python -m` and scripts find modules of the current directory, and so must a reward named in a config.
    sys.path.append(os.getcwd())
    plugins = load_plugins()
    backend, reason = select_backend(plugins, args.backend)
    print(f"backend: {backend.name} ({reason})", file=sys.stderr, flush=True)
    loaded = load_config(args.config, args.overrides, backend=backend, plugins=plugins)
    metrics = evaluate_checkpoint(loaded, plugins, args.checkpoint)
    if args.out is not None:
        args.out.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    print_table(metrics)
    return 0


def print_table(metrics: Mapping[str, float]) -> None:
    """Print one line for each metric."""
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:.6g}")
