"""Entry point of every command, and its error handling."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from types import TracebackType

from anygauge.cli import (
    check_model,
    convert,
    demo,
    doctor,
    hooks,
    import_,
    init,
    keys,
    launch,
    parity,
    plan,
    report,
    train,
)
from anygauge.cli import eval as evaluate
from anygauge.cli.arguments import meant, split_arguments
from anygauge.cli.torch_extensions import extension_failure
from anygauge.distributed.garbage import skip_last_collection
from anygauge.observability.control_characters import (
    format_exception,
    format_warning,
    visible,
)
from anygauge.observability.terminal_warnings import terminal_handler
from anygauge.version import __version__
from anygauge_hooks.errors import AnygaugeError, WorkerFailedError

__all__ = ["COMMANDS", "make_parser", "run"]

COMMANDS = {
    "demo": demo,
    "init": init,
    "import": import_,
    "plan": plan,
    "train": train,
    "eval": evaluate,
    "launch": launch,
    "report": report,
    "doctor": doctor,
    "keys": keys,
    "hooks": hooks,
    "check-model": check_model,
    "parity": parity,
    "convert": convert,
}
"""Modules with ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``.

What a command takes beside its options is a default of its parser: ``takes_config_keys`` as options, or
``takes_any_word``, also what looks like an option, in ``args.words``.
"""


def run(argv: Sequence[str]) -> int:
    """Run a command line, without the program name, and return the exit status."""
    skip_last_collection()
    _open_missing_streams()
    sys.excepthook = _print_uncaught
    logging.basicConfig(handlers=[terminal_handler()])
    warnings.formatwarning = format_warning
    try:
        status = _run(_parse(argv))
        return status if _flushed() else 1
    except BrokenPipeError:
        _flushed()
        return 1


def _print_uncaught(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    """Print an exception as Python does, without control characters: its text may be a model's."""
    print(format_exception(error), end="", file=sys.stderr)


def _open_missing_streams() -> None:
    """Open the standard streams that the caller has closed on nothing, for us and for what we start."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nothing = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(nothing.fileno(), True)
            setattr(sys, name, nothing)


def _flushed() -> bool:
    """Return whether all that was printed has arrived."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"anygauge: error: standard output cannot be written: {error}", file=sys.stderr)
        # Closing it at exit must not complain of it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    others, overrides = split_arguments(argv)
    if others and not others[0].startswith("-"):
        _check_command(parser, others[0])
    args, unknown = parser.parse_known_args(others)
    command: argparse.ArgumentParser = args.parser
    if args.takes_any_word:
        args.words = argv[argv.index(args.command) + 1 :]
    elif args.takes_config_keys:
        args.overrides = overrides
        if unknown:
            hint = meant(unknown[0], command) or "a config key is --section.key value"
            command.error(f"unrecognized arguments: {' '.join(unknown)} ({hint})")
    elif unknown or overrides:
        command.error(f"unrecognized arguments: {' '.join([*unknown, *overrides])}")
    return args


def _check_command(parser: argparse.ArgumentParser, name: str) -> None:
    """Exit with status 2 and the command that was meant, if a name is like one."""
    meant = [] if name in COMMANDS else difflib.get_close_matches(name, COMMANDS, n=1)
    if meant:
        parser.error(f"there is no command {name!r}; did you mean {meant[0]}?")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="anygauge",
        description="RL post-training for LLMs on NVIDIA, Ascend and a laptop from one code base.",
        epilog="ANYGAUGE_DEBUG=1 shows the traceback of an error.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"anygauge {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        command.set_defaults(parser=command, takes_config_keys=False, takes_any_word=False)
        module.add_arguments(command)
    return parser


def _run(args: argparse.Namespace) -> int:
    try:
        return int(COMMANDS[args.command].run(args))
    except AnygaugeError as error:
        _report(error)
    except RuntimeError as error:
        failure = extension_failure(error)
        if failure is None:
            raise
        failure.__cause__ = error
        _report(failure)
    return 1


def _report(error: AnygaugeError) -> None:
    if os.environ.get("ANYGAUGE_DEBUG") == "1":
        print(format_exception(error), end="", file=sys.stderr)
    else:
        print(f"anygauge: error: {visible(_text(error))}", file=sys.stderr)


def _text(error: AnygaugeError) -> str:
    """Return an error as a user reads it: one that a worker raised on purpose without its traceback."""
    original = error.original() if isinstance(error, WorkerFailedError) else None
    return str(original or error)
