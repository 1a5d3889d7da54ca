"""Source trees of commits, and environments that run each with its own packages and its own plugins."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.config.tree import Tree, put

ROOT = Path(__file__).parents[1]
CHECK = """
import importlib, json, sys

files = {name: importlib.import_module(name).__file__ for name in json.loads(sys.argv[1])}
print(json.dumps(files))
"""
FAKE_ENGINE = """
import json, sys
from pathlib import Path

try:
    from anygauge.testing.fake_engine.installed import install_fake_engine  # trees before 2026-11-24
except ImportError:
    from anygauge_tests.fake_engine.installed import install_fake_engine

install_fake_engine(Path(sys.argv[1]), *json.loads(sys.argv[2]))
"""
"""With the packages of a tree."""
OPTIONS = {"vocab_size": 18, "lengths": "uniform:2:8"}
"""Options of the fake engine, with the vocabulary of the tiny model."""


def extract(commit: str, directory: Path) -> Path:
    """Write the files of a commit into a new directory and return it; nothing of git is changed."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")
    return directory


def short_id(commit: str) -> str:
    """Return the abbreviated id of a commit."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", f"{commit}^{{commit}}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def tree_label(tree: Path) -> str:
    """Return a label for the packages of a tree as they are now: another one after any edit."""
    digest = hashlib.sha256()
    for package in packages(tree):
        for path in sorted(path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            digest.update(f"{path.relative_to(tree)}\0".encode())
            digest.update(path.read_bytes())
    return f"here-{digest.hexdigest()[:8]}"


def distributions(tree: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the directory and the ``pyproject.toml`` of each distribution in a tree."""
    for path in (tree / "pyproject.toml", *sorted(tree.glob("backends/*/pyproject.toml"))):
        yield path.parent, tomllib.loads(path.read_text(encoding="utf-8"))


def packages(tree: Path) -> list[Path]:
    """Return the directories of the packages that the wheels of a tree contain."""
    return [
        directory / package
        for directory, project in distributions(tree)
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ]


def environment(tree: Path, metadata: Path, *, first: Sequence[Path] = ()) -> dict[str, str]:
    """Return an environment in which Python imports the packages of a tree and finds its entry points.

    The tree's packages and metadata come before those that are installed, whose libraries are used.

    :param metadata: A directory that gets the metadata of the tree's distributions.
    :param first: Directories that come before those of the tree.
    """
    for _, project in distributions(tree):
        write_metadata(project["project"], metadata)
    roots = dict.fromkeys(package.parent for package in packages(tree)) | {tree / "tests" / "support": None}
    path = os.pathsep.join(map(str, (*first, metadata, *roots)))
    return {**os.environ, "PYTHONPATH": path}


def write_metadata(project: Mapping[str, Any], directory: Path) -> None:
    """Write what ``importlib.metadata`` reads of a distribution: its name, version and entry points."""
    name, version = project["name"], project["version"]
    target = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    target.mkdir(parents=True)
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = dict(project.get("entry-points", {}))
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    (target / "entry_points.txt").write_text("".join(f"{line}\n" for line in lines))


def check_packages(tree: Path, environment: Mapping[str, str], python: str = sys.executable) -> None:
    """Check that the packages of a tree are those that an interpreter imports.

    :raises SystemExit: One comes from somewhere else.
    """
    names = {package.name: package for package in packages(tree)}
    command = [python, "-P", "-c", CHECK, json.dumps([*names])]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    for name, file in json.loads(output).items():
        if Path(file).resolve().parent != names[name].resolve():
            raise SystemExit(f"{name} is imported from {file} instead of {names[name]}")


def install_fake_engine(
    directory: Path, environment: Mapping[str, str], *, servers: int, python: str = sys.executable
) -> None:
    """Write the plugin that brings ``rollout.engine = "fake"`` to the runs of a tree.

    :param environment: Of the tree.
    """
    command = [python, "-P", "-c", FAKE_ENGINE, str(directory), json.dumps([[""] * servers, OPTIONS])]
    subprocess.run(command, env=environment, check=True)


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as tables in tables."""
    tables: Tree = {}
    for path, value in keys.items():
        put(tables, path, value)
    return tables
