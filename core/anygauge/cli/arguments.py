"""Arguments of the command line: paths, and ``--section.key value`` among the options of a command."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.disk import why_impossible

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec

__all__ = ["finite", "is_override", "local_path", "meant", "positive", "requested_backend", "split_arguments"]

_OVERRIDE = re.compile(r"""--[A-Za-z_]\w*(\.([\w:-]+|"[^"]*"))+(=.*)?""", re.DOTALL)
"""A key of a user's function is quoted: ``--rollout.filter_options."package.module:function".least=1``."""

_DEVICES = ("--device", "--devices", "--gpus", "--num-gpus")
"""How others choose devices, or how many of them."""


def local_path(text: str) -> Path:
    """Return the path that an argument names, for :mod:`argparse`.

    >>> local_path("runs/first").name
    'first'
    """
    path = Path(text)
    problem = why_impossible(path)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"the path {problem}")
    return path


def finite(text: str, unit: str = "") -> float:
    """Return the finite number above 0 that an argument is, for :mod:`argparse`.

    :param unit: For the error: `` of GiB``.

    >>> finite("1.5")
    1.5
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number{unit} above 0")
    return number


def positive(text: str) -> int:
    """Return the number above 0 that an argument is, for :mod:`argparse`.

    >>> positive("8")
    8
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def requested_backend(plugins: Plugins, name: str | None) -> BackendSpec:
    """Return the backend of a name, which need not be able to run here, or the one that a run would take."""
    from anygauge.plugins import find_backend, select_backend

    if name is None:
        return select_backend(plugins)[0]
    return find_backend(plugins, plugins.named("register_backends"), name)


def is_override(token: str) -> bool:
    """Return whether a token names a config key.

    >>> [is_override(token) for token in ("--train.lr", "--train.lr=1e-4", "--dry-run", "a.toml")]
    [True, True, False, False]
    """
    return _OVERRIDE.fullmatch(token) is not None


def meant(token: str, command: argparse.ArgumentParser) -> str:
    """Return what an unknown argument was meant to be, as a hint; empty if it is like nothing.

    ``key=value`` is Hydra's way to write a config key, and an option may be that of another project.
    """
    from anygauge.config.validate import meant_foreign, meant_key, sections

    key, equals, value = token.partition("=")
    name = key.lstrip("-+")
    if "." in name and (hint := meant_foreign(name)):
        return _as_options(hint)
    if equals and is_override(f"--{key}"):
        table = name.partition(".")[0]
        return f"write --{key} {value}" if table in dict(sections()) else meant_key(table)
    if not token.startswith("--"):
        return f"a config key begins with two dashes: --{token.lstrip('-')}" if "." in token else ""
    options = [option for action in command._actions for option in action.option_strings]
    if close := difflib.get_close_matches(key, options, n=1, cutoff=0.8):
        return f"did you mean {close[0]}?"
    if key in _DEVICES and "--backend" in options:
        return "--backend NAME is the kind of device, --placement.train_workers their number"
    return _as_options(meant_key(name.replace("-", "_")))


def _as_options(hint: str) -> str:
    """Return a hint with the config keys that it suggests as options."""
    from anygauge.config.validate import sections

    is_suggestion = hint.startswith(("write ", "did you mean "))
    tables = "|".join(name for name, _ in sections())
    return re.sub(rf"(?<![\w./-])(?=(?:{tables})\.)", "--", hint) if is_suggestion else hint


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into options and config overrides, with their values.

    >>> split_arguments(["train", "--run.seed", "-1", "a.toml", "--train.lr=1", "--dry-run"])
    (['train', 'a.toml', '--dry-run'], ['--run.seed', '-1', '--train.lr=1'])
    """
    others: list[str] = []
    overrides: list[str] = []
    queue = list(arguments)
    while queue:
        token = queue.pop(0)
        if not is_override(token):
            others.append(token)
            continue
        overrides.append(token)
        if "=" not in token and queue and not queue[0].startswith("--"):
            overrides.append(queue.pop(0))
    return others, overrides
