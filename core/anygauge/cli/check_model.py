"""``anygauge check-model``: whether a train engine computes a model as transformers does."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.cli.arguments import local_path, positive
from anygauge.observability.control_characters import visible
from anygauge_hooks.errors import ConfigError

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge.testing.model_worker import CheckRow
    from anygauge_hooks.types import BackendSpec

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Compare a model with transformers': names, weights, layers, log-probs, gradients, tokenizer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("directory", type=local_path, metavar="DIR", help="a Hugging Face directory")
    parser.add_argument(
        "--engine", default="megatron", metavar="NAME", help="train engine (default megatron)"
    )
    parser.add_argument("--backend", metavar="NAME", help="backend (default: as anygauge train chooses)")
    parser.add_argument("--prompt", metavar="TEXT", help="text to compare (default: a sentence)")
    parser.add_argument(
        "--against",
        type=_server,
        metavar="ENGINE",
        help="transformers (the default), or sglang: also compare with a server of this rollout engine",
    )
    parser.add_argument(
        "--layers", type=positive, metavar="N", help="check the first N layers, for a model that does not fit"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let Python files of the directory run"
    )


def _server(name: str) -> str | None:
    """Return the rollout engine with a server, or ``None`` for the model that is always compared."""
    return None if name == "transformers" else name


def run(args: argparse.Namespace) -> int:
    """Print one row for each check; the status is 0 if all pass."""
    from anygauge.plugins import load_plugins, select_backend

    plugins = load_plugins()
    backend, _ = select_backend(plugins, args.backend)
    if args.against is not None:
        plugins.get("register_rollout_engines", args.against)  # before the checks, which take minutes
    with tempfile.TemporaryDirectory() as scratch:
        if args.layers is not None:
            from anygauge.testing.model_cut import cut_model

            whole, args.directory = args.directory, Path(scratch) / args.directory.resolve().name
            cut_model(whole, args.directory, args.layers)
        return 0 if print_rows(_rows(args, plugins, backend), args.against) else 1


def _rows(args: argparse.Namespace, plugins: Plugins, backend: BackendSpec) -> Iterator[CheckRow]:
    from anygauge.testing.model_worker import PROMPT, CheckRow, load_model_config, one_worker

    try:
        loaded = load_model_config(
            args.directory, args.engine, plugins, backend, trust_remote_code=args.trust_remote_code
        )
    except ConfigError as error:
        # The first line counts the problems of a file that nobody wrote.
        _, _, problems = error.args[0].partition(":\n")
        yield CheckRow("configuration", "FAIL", " ".join(f"{problems} [{error.code}]".split()))
        return
    with one_worker(loaded, plugins) as context:
        from transformers.utils import logging

        from anygauge.testing.model_check import check_model

        logging.disable_progress_bar()
        prompt = args.prompt or PROMPT
        yield from check_model(loaded.config, plugins, context, prompt, against=args.against)


def print_rows(rows: Iterator[CheckRow], against: str | None = None) -> bool:
    """Print rows as they come, and those that were not reached, and return whether all pass."""
    from anygauge.testing.model_worker import CheckRow, checks

    done = []
    for row in rows:
        done.append(row)
        _print(row)
    reached = {row.name for row in done}
    for name in checks(against):
        if name not in reached:
            _print(CheckRow(name, "NOT RUN", f"needs {done[-1].name} to pass"))
    return reached.issuperset(checks(against)) and all(row.status == "PASS" for row in done)


def _print(row: CheckRow) -> None:
    print(visible(f"{row.status:<9}{row.name:<15}{row.found}"), flush=True)
