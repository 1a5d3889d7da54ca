"""``anygauge convert``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from anygauge.cli.arguments import local_path, positive
from anygauge.observability.control_characters import visible

__all__ = ["HELP", "add_arguments", "run"]

TELL_S = 10.0
"""Seconds between lines of progress."""
HELP = "Convert weights between Hugging Face directories, FP8 ones too, and Megatron checkpoints."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the directions."""
    direction = parser.add_mutually_exclusive_group(required=True)
    for option, form in (("--to-megatron", "Megatron checkpoint"), ("--to-hf", "Hugging Face directory")):
        direction.add_argument(
            option, nargs=2, type=local_path, metavar=("DIR", "OUT"), help=f"write a {form} to OUT"
        )
    direction.add_argument(
        "--to-bfloat16",
        nargs=2,
        type=local_path,
        metavar=("DIR", "OUT"),
        help="write the bfloat16 model of a Hugging Face directory with FP8 weights to OUT",
    )
    parser.add_argument(
        "--model",
        type=local_path,
        metavar="HF_DIR",
        help="model of a run's checkpoint (default: that of the run)",
    )
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="processes that share the work (default: by size)"
    )
    parser.add_argument("--check", action="store_true", help="compare OUT with the source, tensor by tensor")


def run(args: argparse.Namespace) -> int:
    """Convert one directory into another, new one."""
    if args.to_bfloat16 is not None:
        return _dequantize(args)
    from anygauge.engines.megatron.conversion.paths import check_source, check_target, is_of_run

    source, target = args.to_megatron or args.to_hf
    check_source(source, megatron=args.to_megatron is None, model=args.model)
    check_target(target, source)
    if is_of_run(source):
        from anygauge.run_directory.checkpoint_reader import read_checkpoint

        read_checkpoint(source)  # which looks at every byte
    from anygauge.engines.megatron.conversion import convert
    from anygauge.plugins import load_plugins

    function = convert.hf_to_megatron if args.to_megatron else convert.megatron_to_hf
    left_out = function(
        source, target, load_plugins(), workers=args.workers, check=args.check, model=args.model
    )
    for name, count in sorted(left_out.items()):
        text = (
            f"left out: {count} tensors ({name} ...), which the model does not have or has already"
            if args.to_megatron
            else f"left out: {count} rows of {name}, which are padding: 0, and of no token of the vocabulary"
        )
        print(visible(text))
    print(f"wrote {target}{', the same to the bit' if args.check else ''}")
    return 0


def _dequantize(args: argparse.Namespace) -> int:
    for option, value in (("--model", args.model), ("--workers", args.workers)):
        if value is not None:
            args.parser.error(f"{option} has no effect with --to-bfloat16; leave it out")
    from anygauge.engines.dequantize import to_bfloat16
    from anygauge.engines.megatron.conversion.paths import check_source, check_target

    source, target = args.to_bfloat16
    check_source(source, megatron=False)
    counts = to_bfloat16(source, check_target(target, source), check=args.check, tell=_told())
    print(f"dequantized {counts['dequantized']} tensors; left out {counts['left out']} scales of activations")
    print(f"wrote {visible(str(target))}{', read back and compared' if args.check else ''}")
    return 0


def _told() -> Callable[[int, int], None]:
    """Return what says now and then how many tensors were read."""
    said = time.monotonic()

    def tell(number: int, count: int) -> None:
        nonlocal said
        if time.monotonic() - said >= TELL_S:
            said = time.monotonic()
            print(f"tensor {number} of {count}", flush=True)

    return tell
