"""The rows of JSON Lines files as bytes: where they are, and which of them a slice takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from anygauge.config.data_files import NO_FILE, why_no_file
from anygauge_hooks.errors import DataError

__all__ = ["Identity", "Line", "count_lines", "file_identity", "read_slice", "resolve_slice", "unreadable"]

HINT = "data.train and eval.data are lists of JSONL, Parquet or CSV files."

_SNIFFED_BYTES = 64
_FORMATS = (
    (b"\x1f\x8b", "is compressed with gzip", "Decompress it: gunzip FILE"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd", "Decompress it: unzstd FILE"),
    (b"\xfd7zXZ", "is compressed with xz", "Decompress it: unxz FILE"),
    (b"PK\x03\x04", "is a ZIP archive", "Unpack it and name the file in it."),
    (b"PAR1", "is a Parquet file", "Give its name the suffix .parquet."),
    (b"version https://git-lfs", "is a pointer of Git LFS", "Download the file: git lfs pull"),
)
"""First bytes of files that are no lines, what they are, and what to do."""


class Line(NamedTuple):
    """A line that is not blank."""

    number: int
    """Line number from 1, blank lines included."""
    offset: int
    content: bytes
    """With its end."""


class Identity(NamedTuple):
    """File identity, which changes when the file does."""

    path: str
    size: int
    mtime_ns: int
    inode: int


def file_identity(path: Path) -> Identity:
    """Return the identity of a file: its path, size, modification time and inode.

    :raises DataError: It cannot be read.
    """
    problem = why_no_file(path)
    if problem not in (None, NO_FILE):
        raise DataError(f"{path} {problem}.", hint=HINT)
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise unreadable(path, error) from error
    return Identity(os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ino)


def read_slice(path: Path, rows: slice) -> Iterator[Line]:
    """Return the lines that a slice takes; blank lines are no rows.

    :raises DataError: The file cannot be read.
    """
    start, stop = rows.start, rows.stop
    if min(start or 0, stop or 0) < 0:
        start, stop = resolve_slice(rows, count_lines(path))
    return islice(_read_lines(path), start, stop)


def count_lines(path: Path) -> int:
    """Return the number of lines that are not blank.

    :raises DataError: The file cannot be read.
    """
    return sum(1 for _ in _read_lines(path))


def resolve_slice(rows: slice, num_rows: int) -> tuple[int, int]:
    """Return the bounds of a slice of ``num_rows`` rows, neither negative nor crossed."""
    start, stop, _ = rows.indices(num_rows)
    return start, max(start, stop)


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error of a file that the system does not give."""
    return DataError(f"Cannot read {path}: {error.strerror}.", hint=HINT)


def _refuse_other_formats(path: Path, start: bytes) -> None:
    """Raise if a file's first bytes are not those of JSON Lines: each of its lines would be an error."""
    problem, hint = next((why for mark, *why in _FORMATS if start.startswith(mark)), ("", ""))
    if start.lstrip().startswith(b"["):
        problem, hint = "is one JSON array", "Write one object per line: jq -c '.[]' OLD > NEW"
    if problem:
        raise DataError(f"{path} {problem}, and not JSON Lines.", hint=hint)


def _read_lines(path: Path) -> Iterator[Line]:
    offset = 0
    try:
        with path.open("rb") as stream:
            _refuse_other_formats(path, stream.read(_SNIFFED_BYTES))
            stream.seek(0)
            for number, content in enumerate(stream, 1):
                if not content.isspace():
                    yield Line(number, offset, content)
                offset += len(content)
    except OSError as error:
        raise unreadable(path, error) from error
