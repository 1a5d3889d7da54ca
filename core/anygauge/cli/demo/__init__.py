"""``anygauge demo``: GRPO on a tiny model, from inputs that it makes itself."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

__all__ = ["HELP", "RECIPE", "add_arguments", "run"]

HELP = "Train a tiny model with GRPO: 3 to 5 minutes on two cores, nothing to download."
RECIPE = Path(__file__).with_name("arithmetic_grpo.toml")
"""A link to the example in a clone, and a file in a wheel."""
INPUTS = "runs/arithmetic-inputs"
"""Directory that the recipe names, from the current one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(takes_config_keys=True)
    parser.usage = "anygauge demo [--seed N] [--section.key value ...] [--backend NAME]"
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the model and of the run")
    parser.add_argument("--backend", metavar="NAME", help="default: the only usable accelerator, else cpu")


def run(args: argparse.Namespace) -> int:
    """Make the inputs, and train."""
    from anygauge.api.start import load, say, train_loaded
    from anygauge.distributed.garbage import freeze_living_objects

    overrides = [("run.seed", args.seed), *args.overrides]
    # The inputs take a while: what is wrong with the rest is said before.
    load(RECIPE, overrides, say=lambda _: None, backend=args.backend, is_dry=True, check_files=False)
    say(f"making the inputs in {INPUTS}: a tiny Qwen3, additions below 100; about a minute on two cores")
    make_inputs(args.seed)
    loaded = load(RECIPE, overrides, say=say, backend=args.backend)
    train_loaded(loaded, say=say, when_built=freeze_living_objects)
    return 0


def make_inputs(seed: int) -> None:
    """Make model and data in a process of their own, whose threads and imports the run does not inherit.

    :raises SystemExit: The process failed, and has said why.
    """
    command = ("-m", "anygauge.cli.demo.inputs", "--seed", str(seed), "--out", INPUTS)
    done = subprocess.run([sys.executable, *command], check=False)
    if done.returncode:
        raise SystemExit(1)
