"""``anygauge import``: a script or config of slime, verl or TRL as a config of anygauge."""

from __future__ import annotations

import argparse
import re
import shlex
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.migrate.table import PROJECTS

if TYPE_CHECKING:
    from anygauge.migrate.table import Imported

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Convert a script or config of slime, verl or TRL, which is read and not executed."
STATUS = "The status is 0 if the config is written, complete or not; stderr lists what it still needs."

MOST_BYTES = 262_144
"""Largest input; published scripts have up to 20 kB, verl's generated configs 40 kB."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
NO_SGLANG = "SGLang is not installed"
CHECK = "`anygauge train --dry-run --no-file-check`"
TITLE = "# Written by `{command}` from {file}.\n# docs/migrate/{project}.md has the table of arguments.\n\n"
UNFINISHED = "To complete, and to uncomment:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = STATUS
    parser.add_argument("project", choices=PROJECTS, help="the project that the file is for")
    parser.add_argument(
        "file", metavar="FILE", help="a shell script; verl and TRL also a YAML config, TRL a Python script"
    )
    parser.add_argument("--out", metavar="CONFIG.toml", help="default: standard output")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    parser.add_argument(
        "--backend", metavar="NAME", help="check for this backend; default: as `anygauge train`"
    )


def _comment(unfinished: Sequence[str]) -> str:
    """Return the lines that the user must complete, as a comment."""
    return "".join(f"# {line}\n" for line in (UNFINISHED, *unfinished)) + "\n" if unfinished else ""


def run(args: argparse.Namespace) -> int:
    """Write the config, and list what has no counterpart and what the config still needs."""
    import tomli_w

    from anygauge.migrate.project import import_text
    from anygauge_hooks.errors import ConfigError

    file = Path(args.file)
    text = _read(file)
    try:
        result = import_text(args.project, text, file.name)
    except ValueError as error:
        hint = f"docs/migrate/{args.project}.md shows which files are read."
        raise ConfigError(f"{file} is no script or config of {args.project}: {error}.", hint=hint) from error
    tree = _tree(result, file)
    if _drop_refused(result, tree):
        tree = _tree(result, file)
    command = shlex.join(["anygauge", "import", args.project, file.name])
    title = TITLE.format(command=ascii(command)[1:-1], file=ascii(file.name)[1:-1], project=args.project)
    _write(args, title + _comment(result.unfinished) + tomli_w.dumps(tree))
    _report(result)
    _check(tree, args.backend)
    return 0


def _read(file: Path) -> str:
    """Return the text of a file.

    :raises ConfigError: It is missing, too large, or not a text.
    """
    from anygauge_hooks.errors import ConfigError

    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise OSError("it is not a regular file")
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        text = content.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} cannot be read: {reason}.", hint="Name a script or a config.") from error
    if len(content) > MOST_BYTES:
        hint = "Import the script that passes the arguments, or cut out what does not concern the run."
        raise ConfigError(f"{file} has more than {MOST_BYTES:,} bytes.", hint=hint)
    if (control := _CONTROL.search(text)) is not None:
        line = text.count("\n", 0, control.start()) + 1
        raise ConfigError(f"{file}, line {line}, has a control character.", hint="Name a text file.")
    return text


def _tree(result: Imported, file: Path) -> dict[str, Any]:
    """Return the config as nested tables, in the order of the schema, with a name for the run."""
    from anygauge.config.tree import put
    from anygauge.config.validate import sections

    if "run.name" not in result.keys:
        result.put("run.name", _NO_NAME.sub("-", file.stem).strip("-._") or "imported")
    tree: dict[str, Any] = {}
    order = [name for name, _ in sections()]
    for key, value in sorted(result.keys.items(), key=lambda each: order.index(each[0].partition(".")[0])):
        put(tree, key, value)
    return tree


def _drop_refused(result: Imported, tree: dict[str, Any]) -> bool:
    """Leave out values that the schema refuses, each with a note, and return whether there are any."""
    from anygauge.config.validate import validate

    refused = {each.path: each for each in validate(tree).problems if each.path in result.keys}
    for key, problem in refused.items():
        result.miss(key, f"{result.keys.pop(key)!r} is not written: {problem.hint}")
    return bool(refused)


def _write(args: argparse.Namespace, text: str) -> None:
    from anygauge_hooks.errors import ConfigError

    if args.out is None:
        print(text, end="")
        return
    try:
        with Path(args.out).open("w" if args.force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        hint = "--force overwrites it; --out FILE writes another one."
        raise ConfigError(f"{args.out} exists.", hint=hint) from error
    except OSError as error:
        hint = "Name another file with --out."
        raise ConfigError(f"Cannot write {args.out}: {error.strerror}.", hint=hint) from error
    _say(f"wrote {args.out}")


def _report(result: Imported) -> None:
    _say(f"converted: {len(result.converted)} arguments; {len(result.unneeded)} need no key")
    if result.missing:
        _say(f"no counterpart: {len(result.missing)}")
    for name, why in result.missing:
        _say(f"  {name}: {why}")


def _check(tree: dict[str, Any], backend: str | None) -> None:
    """Say which keys the config still needs, as ``anygauge train --dry-run --no-file-check`` would."""
    from anygauge.api.start import load
    from anygauge_hooks.errors import ConfigError

    try:
        load(tree, (), say=lambda _: None, backend=backend, is_dry=True, check_files=False)
    except ConfigError as error:
        lines = str(error.args[0]).splitlines()
        problems = lines[1:] or lines
        if all(NO_SGLANG in line for line in problems):
            _say(f"the config passes {CHECK}; SGLang is not installed here to check its arguments")
        else:
            _say("the config is not complete yet:", *problems)
    else:
        _say(f"the config passes {CHECK}")


def _say(*lines: str) -> None:
    """Print to stderr, without control characters: stdout is for the config."""
    from anygauge.observability.control_characters import visible

    for line in lines:
        print(visible(line), file=sys.stderr)
