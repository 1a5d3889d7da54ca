"""Parse the string of a data file into a path and a row range."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PurePosixPath

from anygauge.config.schema import DataFile
from anygauge.wording import listed

__all__ = ["NO_FILE", "SUFFIXES", "WANTED", "dataset_name", "meant_slice", "split_slice", "why_no_file"]

NO_FILE = "no such file"
WANTED = "name JSONL, Parquet or CSV files"

_SLICE = re.compile(r"@\[[^/]*$")
_BOUNDS = re.compile(r"@\[\s*(-?\d+)?\s*:\s*(-?\d+)?\s*\]")
_BARE = re.compile(r"(.*[^@])(\[\s*-?\d*\s*:\s*-?\d*\s*\])")
"""A path whose slice lacks its ``@``."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
"""Suffixes of data files, in lower case."""
_MOST_NAMED = 3
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe, which can be read only once"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def split_slice(path: str) -> tuple[str, slice]:
    """Return the file of ``FILE@[a:b]`` and its rows; without a slice these are all.

    :raises ValueError: The text after the file is no slice; the error says what a slice looks like.
    """
    match = _SLICE.search(path)
    if match is None:
        return path, slice(None)
    bounds = _BOUNDS.fullmatch(match[0])
    if bounds is None:
        raise ValueError(
            f"{match[0]} is not a slice: write @[a:b] with whole numbers, each of which may be left out "
            "or, counted from the end, negative"
        )
    start, stop = (None if bound is None else int(bound) for bound in bounds.groups())
    return path[: match.start()], slice(start, stop)


def meant_slice(path: str) -> str | None:
    """Suggest the path for one that ends like a slice without its ``@``."""
    match = _BARE.fullmatch(path)
    return f"{match[1]}@{match[2]}" if match else None


def dataset_name(file: DataFile) -> str:
    """Return the name of a file's data set: its own, or that of the file without suffix and slice.

    Characters that a name cannot have become dashes.
    """
    if file.name is not None:
        return file.name
    stem = PurePosixPath(_SLICE.sub("", file.path)).stem
    return _NOT_IN_NAMES.sub("-", stem).lstrip("._-") or "data"


def why_no_file(path: Path) -> str | None:
    """Return why a path cannot be read as a file, as a clause; ``None`` if it can.

    It is not opened: opening a pipe waits for somebody to write into it.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else NO_FILE
    except (OSError, ValueError) as error:
        return f"cannot be looked at: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISREG(mode):
        return None
    kind = next((name for holds, name in _KINDS if holds(mode)), "no regular file")
    return f"is {kind}{_held(path) if stat.S_ISDIR(mode) else ''}"


def _held(directory: Path) -> str:
    """Return which data files a directory has, as the end of a clause."""
    try:
        names = sorted(path.name for path in directory.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError:
        return ""
    return f" with {listed(names, _MOST_NAMED)}" if names else " without data files"
