"""CSV files as JSON lines: the first row names the fields, and every value is text."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from anygauge.data.lines import Line, resolve_slice
from anygauge_hooks.errors import DataError

__all__ = ["count_csv_rows", "is_csv", "read_csv"]

LONGEST_FIELD = 2**28
"""Characters; Python's own limit is 131,072, which a long prompt exceeds."""


def is_csv(path: Path) -> bool:
    """Return whether a file is named as one."""
    return path.suffix.lower() == ".csv"


def count_csv_rows(path: Path) -> int:
    """Return the number of rows below the header.

    :raises DataError: The file cannot be read.
    """
    return sum(1 for _ in _read_rows(path))


def read_csv(path: Path, rows: slice, output: BinaryIO) -> Iterator[Line]:
    """Yield the rows that a slice takes as JSON lines, each once it was written.

    :param output: Gets the lines; offsets count from its start.
    :returns: Lines whose numbers are those of the rows below the header, from 1.
    :raises DataError: The file, or a row of it, cannot be read.
    """
    start, stop = rows.start or 0, rows.stop
    if start < 0 or (stop or 0) < 0:
        start, stop = resolve_slice(rows, count_csv_rows(path))
    offset = 0
    for number, fields in islice(enumerate(_read_rows(path), 1), start, stop):
        content = json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        output.write(content)
        yield Line(number, offset, content)
        offset += len(content)


def _read_rows(path: Path) -> Iterator[Mapping[str, str]]:
    csv.field_size_limit(LONGEST_FIELD)
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            names = next(reader, [])
            _check_names(path, names)
            for cells in filter(None, reader):
                line = reader.line_num
                if len(cells) != len(names):
                    raise ValueError(f"it has {len(cells)} cells, and the first row has {len(names)}")
                yield dict(zip(names, cells, strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"Cannot read {path} at line {line} or behind it: {error}.",
            hint="The file must be CSV in UTF-8 with commas, double quotes and a first row of names.",
        ) from error


def _check_names(path: Path, names: Sequence[str]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"{path} has two columns {repeated!r}.", hint="Rename one of them.")
