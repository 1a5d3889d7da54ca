"""Index of a file's usable rows and their offsets: built in one pass, cached for the next start.

The pass parses and tokenizes every row, so that a bad one is known before anything starts. What stays is 20
bytes a row, mapped from disk; a row is parsed again when it is drawn.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from anygauge.config.rules.file import INPUTS
from anygauge.data.cache import IndexCache, no_place
from anygauge.data.csv_rows import count_csv_rows, is_csv, read_csv
from anygauge.data.fields import RowFields
from anygauge.data.lines import Line, count_lines, file_identity, read_slice
from anygauge.data.parquet import count_rows, is_parquet, read_parquet
from anygauge.data.problems import BadMediaError, BadRowError, Problems
from anygauge.data.rows import RowReader
from anygauge.disk import read_json
from anygauge_hooks.errors import DataError

__all__ = ["FileIndex", "check_first_rows", "open_index"]

logger = logging.getLogger(__name__)

FORMAT = 3
"""Changes with what an index holds, and with what makes a row usable."""
ROWS_AT_ONCE = 1000
"""Rows that are tokenized together."""
ROWS_WITH_MEDIA = 50
"""Rows that are read together where they may hold whole images."""
FIRST_ROWS, FIRST_WITH_MEDIA = 100, 4
"""Rows of a file that are looked at before the processes of a run start; of those with media a few."""
ROW = np.dtype([("offset", "<u8"), ("length", "<u4"), ("number", "<u4"), ("crc", "<u4")])
"""Offset and length of a row, its line or row number, and the checksum of its bytes."""
GIVEN = re.compile(r"(.+)-[0-9a-f]{12}\.jsonl")
"""Name of a file with the rows that a program gave."""
_ROWS, _LINES, _SUMMARY = "rows.bin", "lines.jsonl", "index.json"
_LARGE = 2**26
"""Bytes of a file whose first pass is worth a line in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIndex:
    """The usable rows of a file, or of a slice of it."""

    path: Path
    """As the config names it."""
    lines: Path
    """File with the rows as JSON lines."""
    rows: NDArray[np.void]
    """Rows of dtype :data:`ROW`, memory-mapped from disk."""
    num_rows: int
    """Rows read."""
    num_dropped: int
    """Rows dropped because they were too long."""
    num_unreadable: int
    """Rows dropped because their media cannot be read."""
    digest: str
    """Digest of the usable rows' bytes."""
    problems: Problems = field(default_factory=Problems)
    """Rows that are wrong; then the index is not to be used."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, position: int) -> str:
        """Return file and line of a row."""
        return _place(self.path, int(self.rows["number"][position]))

    def contents(self, positions: Sequence[int]) -> list[bytes]:
        """Return rows as JSON.

        :raises DataError: One is not what it was when the index was made.
        """
        try:
            with self.lines.open("rb") as stream:
                return [self._content(stream.fileno(), position) for position in positions]
        except OSError as error:
            raise self.changed(positions[0], str(error)) from error

    def changed(self, position: int, problem: str) -> DataError:
        """Return the error of a row that was good when the index was made."""
        hint = "The file changed while the run was reading it. Restore it, then continue with --resume."
        if self.lines != self.path:
            hint = f"Do not change {self.lines.parent} during a run; it may be deleted after."
        return DataError(f"{self.place(position)}: {problem}", hint=hint)

    def _content(self, descriptor: int, position: int) -> bytes:
        row = self.rows[position]
        content = os.pread(descriptor, int(row["length"]), int(row["offset"]))
        if zlib.crc32(content) != row["crc"]:
            raise self.changed(position, "the row has changed since the start")
        return content


def open_index(path: Path, rows: slice, reader: RowReader, cache: IndexCache) -> FileIndex:
    """Return the index of a file as it was kept, or make it.

    :param rows: Which rows to look at; a slice without step.
    :raises DataError: The file cannot be read, or has no rows there.
    """
    key = _key(path, rows, reader)
    kept = cache.find(key) if key else None
    if kept is not None:
        try:
            return _load(kept, path, key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("rebuilding the index of %s, since %s cannot be used: %s", path, kept, error)
            cache.remove(kept)
    directory, problems = _make_somewhere(path, rows, reader, cache, key)
    if key and not problems.count:
        directory = cache.keep(directory, key)
    return replace(_load(directory, path, key), problems=problems)


def check_first_rows(path: Path, rows: slice, fields: RowFields) -> dict[str, Any]:
    """Return the first row, once the first ones are found to be good as far as no tokenizer is needed.

    :raises DataError: The file cannot be read, has no rows there, or one of the first is bad.
    """
    found = _converted(path, rows, fields, BytesIO()) if _is_converted(path) else read_slice(path, rows)
    first, problems = list[dict[str, Any]](), Problems()
    count = FIRST_WITH_MEDIA if fields.media_columns else FIRST_ROWS
    lines = list(islice(found, count))
    for line in lines:
        try:
            first.append(fields.read(line.content))
        except BadRowError as problem:
            problems.append(_place(path, line.number), problem)
    if problems.count:
        problems.report(len(lines), which="first " if len(lines) == count else "")
    if not lines:
        raise _no_rows(path, rows)
    return first[0]


def _key(path: Path, rows: slice, reader: RowReader) -> dict[str, Any]:
    """Return all that decides what the index of a file holds; nothing if that cannot be known."""
    settings = reader.settings()
    if settings is None:
        return {}
    key = {"format": FORMAT, "file": file_identity(path), "rows": [rows.start, rows.stop], "reader": settings}
    plain: dict[str, Any] = json.loads(json.dumps(key))
    return plain


def _load(directory: Path, path: Path, key: Mapping[str, Any]) -> FileIndex:
    """Load the index of a directory.

    :raises ValueError: It is damaged.
    """
    summary = read_json(directory / _SUMMARY)
    lines = directory / _LINES if _is_converted(path) else path
    if summary["key"] != key:
        raise ValueError("it belongs to another file")
    if _is_converted(path) and lines.stat().st_size != summary["lines_size"]:
        raise ValueError(f"{_LINES} has another size")
    if _checksum(directory / _ROWS) != summary["checksum"]:
        raise ValueError(f"{_ROWS} has another checksum")
    return FileIndex(
        path=path,
        lines=lines,
        rows=_map(directory / _ROWS),
        num_rows=summary["num_rows"],
        num_dropped=summary["num_dropped"],
        num_unreadable=summary["num_unreadable"],
        digest=summary["digest"],
    )


def _map(path: Path) -> NDArray[np.void]:
    # An empty file cannot be mapped.
    return np.memmap(path, ROW, mode="r") if path.stat().st_size else np.empty(0, ROW)


def _checksum(path: Path) -> int:
    """Read and not map: what is mapped counts as memory of the process."""
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum


# -------------------------------------------------------------------------
# The first pass
# -------------------------------------------------------------------------


def _make_somewhere(
    path: Path, rows: slice, reader: RowReader, cache: IndexCache, key: Mapping[str, Any]
) -> tuple[Path, Problems]:
    """Return the directory in which an index was made, and the rows that are wrong."""
    try:
        directory = cache.workspace()
        return directory, _make(path, rows, reader, directory, key)
    except OSError as error:
        directory = cache.temporary(error)
    try:
        return directory, _make(path, rows, reader, directory, key)
    except OSError as error:
        raise no_place(error) from error


def _make(path: Path, rows: slice, reader: RowReader, directory: Path, key: Mapping[str, Any]) -> Problems:
    """Make the index of a file in a directory, and return the rows that are wrong.

    :raises OSError: The directory cannot be written.
    :raises DataError: The file cannot be read, or has no rows.
    """
    identity = file_identity(path)
    if identity.size > _LARGE:
        logger.info("checking every row of %s; what is found is kept for the next start", path)
    with ExitStack() as stack:
        output = stack.enter_context((directory / _ROWS).open("wb"))
        copy = stack.enter_context((directory / _LINES).open("wb")) if _is_converted(path) else None
        lines = read_slice(path, rows) if copy is None else _converted(path, rows, reader.fields, copy)
        counts, problems = _check_rows(path, lines, reader, output)
    if file_identity(path) != identity:
        raise DataError(f"{path} changed while it was read.", hint="Start again once it is complete.")
    if not counts["num_rows"]:
        raise _no_rows(path, rows)
    _write_summary(directory, {"key": key, **counts})
    return problems


def _is_converted(path: Path) -> bool:
    """Return whether the rows of a file are copied as JSON lines."""
    return is_parquet(path) or is_csv(path)


def _converted(path: Path, rows: slice, fields: RowFields, copy: BinaryIO) -> Iterator[Line]:
    if is_csv(path):
        return read_csv(path, rows, copy)
    needed, only_needed = fields.columns()
    return read_parquet(path, rows, copy, needed=needed, only_needed=only_needed, media=fields.media_columns)


def _check_rows(
    path: Path, lines: Iterator[Line], reader: RowReader, output: BinaryIO
) -> tuple[dict[str, int], Problems]:
    """Write the usable rows, and return how many there are of each kind, and the bad ones."""
    problems = Problems()
    num_rows = num_dropped = num_unreadable = 0
    at_once = ROWS_WITH_MEDIA if reader.fields.media_columns else ROWS_AT_ONCE
    while chunk := list(islice(lines, at_once)):
        num_rows += len(chunk)
        usable = []
        rows = reader.read([line.content for line in chunk], [path.parent] * len(chunk))
        for line, row in zip(chunk, rows, strict=True):
            if isinstance(row, BadMediaError) and reader.drops_media:
                num_unreadable += 1
                logger.warning("%s is left out: %s", _place(path, line.number), row)
            elif isinstance(row, BadRowError):
                problems.append(_place(path, line.number), row)
            elif reader.is_too_long(row):
                num_dropped += 1
            else:
                usable.append((line.offset, len(line.content), line.number, zlib.crc32(line.content)))
        output.write(np.array(usable, ROW).tobytes())
    counts = {"num_rows": num_rows, "num_dropped": num_dropped, "num_unreadable": num_unreadable}
    return counts, problems


def _write_summary(directory: Path, facts: Mapping[str, Any]) -> None:
    lines = directory / _LINES
    summary = {
        **facts,
        "checksum": _checksum(directory / _ROWS),
        "digest": blake2b(_map(directory / _ROWS)["crc"].tobytes(), digest_size=16).hexdigest(),
        "lines_size": lines.stat().st_size if lines.exists() else None,
    }
    (directory / _SUMMARY).write_text(json.dumps(summary), encoding="utf-8")


def _no_rows(path: Path, rows: slice) -> DataError:
    """Return the error of a file, or of a slice of it, in which there is nothing."""
    count = _count_rows(path)
    if not count:
        hint = "Write rows into it." if _is_converted(path) else "Write one JSON object per line."
        return DataError(f"{path} has no rows.", hint=hint)
    start, stop = ("" if bound is None else bound for bound in (rows.start, rows.stop))
    return DataError(
        f"{path} has no rows in @[{start}:{stop}]: it has {count}, numbered from 0 to {count - 1}.",
        hint=f"@[:{count}] takes all of them, @[{count - 1}:] the last; b must be behind a in @[a:b].",
    )


def _count_rows(path: Path) -> int:
    if is_csv(path):
        return count_csv_rows(path)
    return count_rows(path) if is_parquet(path) else count_lines(path)


def _place(path: Path, number: int) -> str:
    if path.parent.name == INPUTS and (name := GIVEN.fullmatch(path.name)):
        return f"{name[1]}: row {number - 1}"  # of a list, counted as Python does
    return f"{path}: row {number}" if _is_converted(path) else f"{path}:{number}"
