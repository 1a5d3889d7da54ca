"""``anygauge parity``: the first op in which two backends, engines, dtypes or kernel sources differ."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.cli.arguments import local_path, positive
from anygauge.observability.control_characters import visible
from anygauge_hooks.errors import ConfigError

if TYPE_CHECKING:
    from anygauge.plugins import Plugins

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Compare two backends, engines, dtypes or kernel sources op by op, forward and backward."
FAMILY = "qwen3"
"""Family whose tiny model is compared if none is named."""
ALPHABET = "0123456789"
"""Characters of its tokenizer, which a run must have: a tiny model computes made-up tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    side = "BACKEND or BACKEND:KEY=VALUE,KEY=VALUE, such as cpu:engine=fsdp,dtype=bfloat16"
    parser.add_argument("a", metavar="A", help=f"the side that is right: {side}")
    parser.add_argument("b", metavar="B", help="the side that is compared with it, in the same form")
    parser.add_argument(
        "--model",
        default=FAMILY,
        metavar="DIR",
        help=f"a Hugging Face directory, or a family whose tiny model is made (default {FAMILY})",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="text to compute (default: a sentence)")
    parser.add_argument("--layers", type=positive, metavar="N", help="compare the first N layers")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let Python files of the directory run"
    )


def run(args: argparse.Namespace) -> int:
    """Print the largest differences, and the first beyond its limit; the status is 0 if none is."""
    from anygauge.plugins import load_plugins
    from anygauge.testing.model_worker import PROMPT
    from anygauge.testing.parity.comparison import check_apart, compare_sides, load_side
    from anygauge.testing.parity.differences import conclusion, first_divergence, table
    from anygauge.testing.parity.sides import parse_side

    plugins, sides = load_plugins(), [parse_side(text) for text in (args.a, args.b)]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = _model(args, plugins, scratch)
        a, b = (load_side(side, model, plugins, trust_remote_code=args.trust_remote_code) for side in sides)
        check_apart(a, b)
        facts = plugins.environment()
        for letter, side in (("A", a), ("B", b)):
            device = facts.get(side.loaded.backend.name)
            print(visible(f"{letter}  {side}{f' ({device})' if device else ''}"), flush=True)
        differences = compare_sides(a, b, plugins, args.prompt or PROMPT, scratch)
    for line in table(differences):
        print(visible(line))
    if a.workers > 1 or b.workers > 1:
        print("ops and layers are not compared: a side has more than one worker")
    print(visible(conclusion(differences)))
    return 0 if first_divergence(differences) is None else 1


def _model(args: argparse.Namespace, plugins: Plugins, scratch: Path) -> Path:
    """Return the directory of the model, made or cut to its first layers where that was asked for."""
    model = _named(args.model, plugins, scratch / "family")
    if args.layers is None:
        return model
    from anygauge.testing.model_cut import cut_model

    cut = scratch / "cut"
    cut_model(model, cut, args.layers)
    return cut


def _named(name: str, plugins: Plugins, target: Path) -> Path:
    path = local_path(name)
    if path.exists():
        return path
    spec = plugins.find("register_models", name)
    if spec is None:
        raise ConfigError(
            f"--model {name} is neither a directory nor a model family.",
            hint="Name a Hugging Face directory, or a family that `anygauge hooks` lists.",
        )
    from transformers.utils import logging

    from anygauge.testing.tiny import tiny_family, tiny_tokenizer

    logging.disable_progress_bar()
    tiny_tokenizer(target, alphabet=ALPHABET)
    return tiny_family(target, spec)
