"""``anygauge check-model``: whether a train engine computes a model as transformers does."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.cli.arguments import local_path, positive
from anygauge.observability.control_characters import visible
from anygauge_hooks.errors import ConfigError

if TYPE_CHECKING:
    from anygauge.config.load import LoadedConfig
    from anygauge.plugins import Plugins
    from anygauge.testing.model_check import CheckRow
    from anygauge_hooks.types import BackendSpec, WorkerContext

__all__ = ["HELP", "PROMPT", "add_arguments", "run"]

HELP = "Compare a model with transformers': names, weights, layers, log-probs, gradients, tokenizer."
PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps for 12 hours."
ROLE = "train"
"""Role of this process, for the plugins that prepare it."""
_SETTINGS: tuple[tuple[str, Any], ...] = (
    *(("run.name", "check-model"), ("run.task", "sft"), ("run.steps", 1), ("data.train", [])),
    # One micro-batch holds all, in the numbers that transformers computes with, and gradients as they are.
    *(("train.dtype", "float32"), ("train.clip_grad", 0.0), ("train.micro_batch_tokens", 1_000_000)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("directory", type=local_path, metavar="DIR", help="a Hugging Face directory")
    parser.add_argument(
        "--engine", default="megatron", metavar="NAME", help="train engine (default megatron)"
    )
    parser.add_argument("--backend", metavar="NAME", help="backend (default: as anygauge train chooses)")
    parser.add_argument(
        "--prompt", default=PROMPT, metavar="TEXT", help="text to compare (default: a sentence)"
    )
    parser.add_argument(
        "--layers", type=positive, metavar="N", help="check the first N layers, for a model that does not fit"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let Python files of the directory run"
    )


def run(args: argparse.Namespace) -> int:
    """Print one row for each check; the status is 0 if all pass."""
    from anygauge.plugins import load_plugins, select_backend

    plugins = load_plugins()
    backend, _ = select_backend(plugins, args.backend)
    with tempfile.TemporaryDirectory() as scratch:
        if args.layers is not None:
            from anygauge.testing.model_cut import cut_model

            whole, args.directory = args.directory, Path(scratch) / args.directory.resolve().name
            cut_model(whole, args.directory, args.layers)
        return 0 if print_rows(_rows(args, plugins, backend)) else 1


def _rows(args: argparse.Namespace, plugins: Plugins, backend: BackendSpec) -> Iterator[CheckRow]:
    from anygauge.testing.model_check import CheckRow, check_model

    try:
        loaded = _load_config(args, plugins, backend)
    except ConfigError as error:
        # The first line counts the problems of a file that nobody wrote.
        _, _, problems = error.args[0].partition(":\n")
        yield CheckRow("configuration", "FAIL", " ".join(f"{problems} [{error.code}]".split()))
        return
    with one_worker(loaded, plugins) as context:
        from transformers.utils import logging

        logging.disable_progress_bar()
        yield from check_model(loaded.config, plugins, context, args.prompt)


def print_rows(rows: Iterator[CheckRow]) -> bool:
    """Print rows as they come, and those that were not reached, and return whether all pass."""
    from anygauge.testing.model_check import CHECKS, CheckRow

    done = []
    for row in rows:
        done.append(row)
        _print(row)
    reached = {row.name for row in done}
    for name in CHECKS:
        if name not in reached:
            _print(CheckRow(name, "NOT RUN", f"needs {done[-1].name} to pass"))
    return reached.issuperset(CHECKS) and all(row.status == "PASS" for row in done)


def _print(row: CheckRow) -> None:
    print(visible(f"{row.status:<9}{row.name:<15}{row.found}"), flush=True)


def _load_config(args: argparse.Namespace, plugins: Plugins, backend: BackendSpec) -> LoadedConfig:
    """Return the config of a run of the model, checked as ``anygauge train`` checks it.

    :raises ConfigError: The engine does not train the model, or the directory is incomplete.
    """
    from anygauge.config import load_config

    settings = [
        *_SETTINGS,
        ("model.path", str(args.directory)),
        ("model.trust_remote_code", args.trust_remote_code),
        ("train.engine", args.engine),
    ]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "check-model.toml"
        file.touch()
        return load_config(file, settings, backend=backend, plugins=plugins, trains=False)


@contextmanager
def one_worker(loaded: LoadedConfig, plugins: Plugins) -> Iterator[WorkerContext]:
    """Make this process the only worker of a run, on the first device of the backend."""
    config, backend = loaded.config, loaded.backend
    plugins.prepare_worker(backend, ROLE, "before_vendor_import", config=config)
    device = plugins.make_device(backend, backend.local_device((), os.environ))
    plugins.prepare_worker(backend, ROLE, "after_config", config=config)
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # not listed

    from anygauge.distributed.process_groups import destroy_process_group, init_process_group
    from anygauge_hooks.types import WorkerContext

    timeout_s = config.run.timeout_s
    init_process_group(
        plugins, backend, HashStore(), rank=0, world_size=1, timeout_s=timeout_s, single_host=True
    )
    try:
        yield WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    finally:
        destroy_process_group()
