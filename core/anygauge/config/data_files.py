"""What the string of a data file says: which file, and which of its rows."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from anygauge.config.schema import DataFile

__all__ = ["dataset_name", "split_slice"]

_SLICE = re.compile(r"@\[[^/]*$")
_BOUNDS = re.compile(r"@\[\s*(-?\d+)?\s*:\s*(-?\d+)?\s*\]")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def split_slice(path: str) -> tuple[str, slice]:
    """Return the file of ``FILE@[a:b]`` and its rows; without a slice these are all.

    :raises ValueError: What follows the file is no slice; says what it must look like.
    """
    found = _SLICE.search(path)
    if found is None:
        return path, slice(None)
    bounds = _BOUNDS.fullmatch(found[0])
    if bounds is None:
        raise ValueError(
            f"{found[0]} is no slice: write @[a:b] with whole numbers, either of which may be left out "
            "or, counted from the end, negative"
        )
    start, stop = (None if bound is None else int(bound) for bound in bounds.groups())
    return path[: found.start()], slice(start, stop)


def dataset_name(file: DataFile) -> str:
    """Return the name of a file's data set: its own, or that of the file without suffix and slice.

    Characters that a name cannot have become dashes.
    """
    if file.name is not None:
        return file.name
    stem = PurePosixPath(_SLICE.sub("", file.path)).stem
    return _NOT_IN_NAMES.sub("-", stem).lstrip("._-") or "data"
