"""``anygauge train``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge.config.load import LoadedConfig
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec, RunInfo

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Train a policy from a TOML config."

_INDENT = 6
_KEYS_TITLE = 'In tables of the file, or as --section.key value. Values are TOML; "none" stands for null.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; config keys are parsed separately."""
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
    parser.add_argument("--keys", action="store_true", help="list every config key and exit")


def run(args: argparse.Namespace) -> int:
    """Load the config and train."""
    _check_usage(args)
    if args.keys:
        print(_KEYS_TITLE, *_keys(), sep="\n")
        return 0
    from anygauge.config import dump_config, load_config
    from anygauge.hub import localized, unresolved
    from anygauge.plugins import load_plugins

    # `python -m` and scripts find modules of the current directory, and so must a reward named in a config.
    sys.path.append(os.getcwd())
    plugins = load_plugins()
    for name, error in sorted(plugins.load_errors.items()):
        _say(f"warning: plugin {name!r} failed to load: {error!r}")
    backend, reason = _backend(plugins, args)
    _say(f"backend: {backend.name} ({reason})")
    loaded = load_config(
        args.config,
        _overrides(args),
        backend=backend,
        plugins=plugins,
        check_files=args.check_files,
        download=not args.dry_run,
        defers_models=not args.dry_run,
    )
    for change in loaded.changes:
        _say(f"filled in: {change}")
    for line in _model(loaded.config, plugins, is_dry=args.dry_run):
        _say(line)
    if args.dry_run:
        for each in unresolved(localized(loaded.config, download=False)) if args.check_files else ():
            _say(f"not checked: {each.key} = {str(each)!r} is not in the cache; a run downloads it")
        print(dump_config(loaded.config), end="")
        return 0
    info = _train(loaded, plugins, args.backend)
    _say(f"done: {info.step} of {info.total_steps} steps; everything is in {info.directory}")
    return 0


def _model(config: Config, plugins: Plugins, *, is_dry: bool) -> Iterator[str]:
    """Yield which model the train engine builds, and what else supports it where nothing is trained."""
    from anygauge.config.rules.architecture import engine_support, support_text
    from anygauge.disk import read_json

    engine = plugins.find("register_train_engines", config.train.engine)
    try:
        hf = read_json(config.model.path / "config.json")
        names = ", ".join(map(str, hf["architectures"]))
    except (OSError, ValueError, KeyError, TypeError):
        return  # not downloaded yet, or a problem that the check of the files has told
    if engine is not None and engine.make_family is not None:
        yield f"model: {names}, built by transformers (train.engine = {engine.name!r})"
    if is_dry and (families := engine_support(plugins, hf)[0]):
        yield support_text(hf, families)


def _train(loaded: LoadedConfig, plugins: Plugins, backend: str | None) -> RunInfo:
    """Start the processes of a run, check what takes longer meanwhile, and run it.

    :param backend: The one that was asked for.
    """
    from anygauge.trainer.start import start_run

    def check() -> None:
        if backend is not None:
            from anygauge.plugins import select_backend

            select_backend(plugins, backend)  # its probe may import torch
        loaded.check_models()

    with start_run(loaded, plugins, check=check) as started:
        from anygauge.distributed.garbage import freeze_living_objects
        from anygauge.trainer.run import train_started

        return train_started(loaded, plugins, started, when_built=freeze_living_objects)


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


def _backend(plugins: Plugins, args: argparse.Namespace) -> tuple[BackendSpec, str]:
    """Return the backend and why it was chosen. One that was asked for is yet to be probed."""
    from anygauge.plugins import find_backend, select_backend

    if args.backend is None:
        return select_backend(plugins)
    reason = "asked for; a dry run does not probe it" if args.dry_run else "asked for"
    return find_backend(plugins, plugins.named("register_backends"), args.backend), reason


def _say(text: str) -> None:
    """Print to stderr: stdout is for what a dry run resolves."""
    print(text, file=sys.stderr, flush=True)


def _keys() -> Iterator[str]:
    from anygauge.config.validate import describe, keys

    indent = " " * _INDENT
    for path, field in keys():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = "required" if field.is_required() else f"default {_toml(default)}"
        yield f"  --{path}  ({shown})"
        yield textwrap.fill(describe(field), 100, initial_indent=indent, subsequent_indent=indent)


def _toml(value: Any) -> str:
    """Return a default as TOML, which for these values is JSON."""
    from anygauge.config.validate import NONE

    return json.dumps(NONE if value is None else value, default=str)
