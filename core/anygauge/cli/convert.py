"""``anygauge convert``."""

from __future__ import annotations

import argparse
from pathlib import Path

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
    from anygauge.engines.megatron.layout import check_source, check_target

    source, target = (Path(path) for path in args.to_megatron or args.to_hf)
    check_source(source, megatron=args.to_megatron is None)
    check_target(target)
    from anygauge.engines.megatron import convert
    from anygauge.plugins import load_plugins

    function = convert.hf_to_megatron if args.to_megatron else convert.megatron_to_hf
    function(source, target, load_plugins())
    print(f"wrote {target}")
    return 0
