"""``anygauge convert``."""

from __future__ import annotations

import argparse
from pathlib import Path

from anygauge_hooks.errors import CheckpointError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Convert weights between a Hugging Face directory and a Megatron checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two directions."""
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--to-megatron", nargs=2, metavar=("HF_DIR", "OUT"), help="write a Megatron checkpoint to OUT"
    )
    direction.add_argument(
        "--to-hf", nargs=2, metavar=("MEGATRON_DIR", "OUT"), help="write a Hugging Face directory to OUT"
    )


def run(args: argparse.Namespace) -> int:
    """Convert one directory into another, new one."""
    source, target = (Path(path) for path in args.to_megatron or args.to_hf)
    _check_paths(source, target)
    from anygauge.engines.megatron import convert
    from anygauge.plugins import load_plugins

    function = convert.hf_to_megatron if args.to_megatron else convert.megatron_to_hf
    function(source, target, load_plugins())
    print(f"wrote {target}")
    return 0


def _check_paths(source: Path, target: Path) -> None:
    """Refuse to start what cannot end well.

    :raises CheckpointError: The source is no directory, or the target holds something.
    """
    if not source.is_dir():
        raise CheckpointError(f"Cannot convert {source}: no such directory.", hint="Name a directory.")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        kind = "is not empty" if target.is_dir() else "is a file"
        raise CheckpointError(
            f"Cannot write to {target}: it {kind}.", hint="Name a new or empty directory, or remove it."
        )
