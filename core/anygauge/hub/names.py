"""Hub names: ``OWNER/NAME[@REVISION]``, ``hf://datasets/OWNER/NAME[@REVISION]/FILE``."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

__all__ = ["DATASETS", "HubName", "data_name", "did_you_mean", "model_name"]

DATASETS = "hf://datasets/"
MOST_MEANT = 3

_REPOSITORY = r"(?=[^@]{3,96}(?:@|$))(?![^@]*(?:--|\.\.))[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*(?<![.-])"
_MODEL = re.compile(rf"(?P<repository>{_REPOSITORY})(?:@(?P<revision>[^@]+))?", re.ASCII)
_DATA = re.compile(
    rf"{DATASETS}(?P<repository>[^/]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<file>.+?)(?P<rows>@\[[^/]*)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository of a hub, or one file of it, and the key that names it."""

    key: str
    """Config key, for messages: ``model.path``."""
    kind: Literal["model", "dataset"]
    repository: str
    """``OWNER/NAME``."""
    revision: str | None
    """Branch, tag or commit; ``None`` is the hub's default branch."""
    file: str | None = None
    """Path in the repository, for data."""
    rows: str = ""
    """The slice behind a file: ``@[a:b]``."""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        if self.file is None:
            return f"{self.repository}{revision}"
        return f"{DATASETS}{self.repository}{revision}/{self.file}{self.rows}"

    @property
    def owner(self) -> str:
        """First part of the repository's name."""
        return self.repository.partition("/")[0]

    def local_clause(self) -> str:
        """Return that a model's name is no directory here, with directories that were meant, as a clause."""
        if self.kind != "model":
            return ""
        return f"it is not a directory in {Path.cwd()}{did_you_mean(Path(self.repository))}"

    def of_file(self, file: str) -> HubName:
        """Return the name of one file of the repository."""
        return replace(self, file=file)

    def at(self, revision: str) -> HubName:
        """Return the same name at another revision."""
        return replace(self, revision=revision)


def did_you_mean(path: Path) -> str:
    """Return directories that the path of one may mean, as the end of a clause; nothing if there are none."""
    meant = _similar_directories(path)
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _similar_directories(path: Path) -> list[str]:
    """Return directories whose path is that one with parts misspelled, or its last part alone."""
    meant = [Path(path.anchor)]
    for part in path.relative_to(path.anchor).parts:
        meant = [folder / name for folder in meant for name in _similar_names(folder, part)]
    if not meant and os.path.isdir(path.parent) and len(path.parts) > 1:
        # Only the last part is wrong, so that it may be anything there.
        there = _directories(path.parent)
        close = difflib.get_close_matches(path.name, there, n=MOST_MEANT, cutoff=0.3) or sorted(there)
        meant = [path.parent / name for name in close]
    if not meant and os.path.isdir(path.name):  # Path.is_dir raises where a name is too long
        meant = [Path(path.name)]
    return [str(each) for each in meant[:MOST_MEANT]]


def _similar_names(folder: Path, name: str) -> list[str]:
    if os.path.isdir(folder / name):
        return [name]
    return difflib.get_close_matches(name, _directories(folder), n=MOST_MEANT)


def _directories(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.iterdir() if each.is_dir()]
    except OSError:  # it is not readable
        return []


def model_name(key: str, path: Path, revision: str | None = None) -> HubName | None:
    """Return the name that a path is, or ``None`` if it is a path of this host or can only be one.

    :param revision: Revision of a path that names none itself.
    """
    match = None if os.path.exists(path) else _MODEL.fullmatch(str(path))
    if match is None:
        return None
    return HubName(
        key=key, kind="model", repository=match["repository"], revision=match["revision"] or revision
    )


def data_name(key: str, path: str) -> HubName | None:
    """Return the name that a data file's path is, or ``None`` if it is a local one.

    >>> str(data_name("data.train[0]", "hf://datasets/openai/gsm8k@main/main/train.parquet@[:100]").at("abc"))
    'hf://datasets/openai/gsm8k@abc/main/train.parquet@[:100]'
    """
    match = _DATA.fullmatch(path)
    if match is None or not re.fullmatch(_REPOSITORY, match["repository"], re.ASCII):
        return None
    return HubName(
        key=key,
        kind="dataset",
        repository=match["repository"],
        revision=match["revision"],
        file=match["file"],
        rows=match["rows"] or "",
    )
