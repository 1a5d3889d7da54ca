"""Facts that reproduce a run: command line, directory, versions and commits."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from anygauge.config.secret_values import without_secrets
from anygauge.version import __version__

__all__ = ["run_facts"]

PACKAGES = ("torch", "transformers", "tokenizers", "megatron-core", "sglang", "ray", "numpy", "triton")
"""Packages that decide how a run computes; those of a backend are facts that its plugin reports."""
GIT_S = 5.0
"""Longest wait for git, which may read a slow file system."""
CLONE = Path(__file__).resolve().parents[3]
"""Root of the clone that the package is in, where it is in one."""


def run_facts(secrets: Collection[str] = ()) -> dict[str, str]:
    """Return the facts about this process and its code.

    :param secrets: Values that are masked in the command line.
    """
    facts = {
        "command": without_secrets(shlex.join(_arguments()), secrets),
        "directory": _directory(),
        # A wheel may be installed within the clone of another project.
        "anygauge": f"{__version__}{_commit(CLONE) if (CLONE / '.git').exists() else ''}",
        "packages": ", ".join(_versions()),
    }
    return {name: value for name, value in facts.items() if value}


def _arguments() -> list[str]:
    program = Path(sys.argv[0])
    return [program.parent.name if program.name == "__main__.py" else program.name, *sys.argv[1:]]


def _directory() -> str:
    """Return the current directory and its commit; nothing if it was deleted."""
    try:
        here = Path.cwd()
    except OSError:
        return ""
    return f"{here}{_commit(here)}"


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _commit(directory: Path) -> str:
    """Return the commit of a clone for the end of a line; nothing outside of one, or without git."""
    try:
        head = _git(directory, "rev-parse", "--short=12", "HEAD")
        return f" (commit {head}{', changed' if _git(directory, 'status', '--porcelain', '-uno') else ''})"
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(directory: Path, *arguments: str) -> str:
    command = ("git", "--no-optional-locks", "-C", str(directory), *arguments)
    # The names of changed files are in no certain encoding.
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=GIT_S, check=True
    )
    return done.stdout.strip()
