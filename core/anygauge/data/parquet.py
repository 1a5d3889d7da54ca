"""Parquet files as JSON lines, a batch of rows at a time."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from anygauge.data.lines import Line, resolve_slice
from anygauge_hooks.errors import DataError

__all__ = ["count_rows", "is_parquet", "read_parquet"]

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000
_ROWS_WITH_MEDIA = 50


def is_parquet(path: Path) -> bool:
    """Return whether a file is named as one."""
    return path.suffix.lower() == ".parquet"


def count_rows(path: Path) -> int:
    """Return the number of rows of a file that was read before."""
    from pyarrow.parquet import read_metadata

    return int(read_metadata(path).num_rows)


def read_parquet(
    path: Path,
    rows: slice,
    output: BinaryIO,
    *,
    needed: Collection[str],
    only_needed: bool,
    media: Collection[str] = (),
) -> Iterator[Line]:
    """Yield the rows that a slice takes as JSON lines, each once it was written.

    A column that JSON cannot hold is left out with a warning, unless it is needed. A member of a struct that
    is null is left out: all rows share one struct type, whose members a row need not have had.

    :param output: Gets the lines; offsets count from its start.
    :param needed: Columns that must be there whole, as far as the file has them.
    :param only_needed: Whether the others are left out.
    :param media: Columns whose bytes are written as ``data:`` text.
    :returns: Lines whose numbers are those of the rows in the Parquet file, from 1.
    :raises DataError: The file, or a row of it, cannot be read.
    """
    offset = 0
    for number, fields in _read_rows(path, rows, needed, only_needed, media):
        content = json.dumps(fields, ensure_ascii=False, default=_data_text).encode() + b"\n"
        output.write(content)
        yield Line(number, offset, content)
        offset += len(content)


def _data_text(value: bytes) -> str:
    return f"data:;base64,{base64.b64encode(value).decode('ascii')}"


def _read_rows(
    path: Path, rows: slice, needed: Collection[str], only_needed: bool, media: Collection[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and fields; pyarrow's errors, some of which are OSErrors, become the project's here."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    first = 0
    try:
        with ParquetFile(path) as file:
            names = _columns(path, file.schema_arrow, needed, only_needed, media)
            start, stop = resolve_slice(rows, file.metadata.num_rows)
            # A dot in a column's name would be taken for a path into it.
            projected = None if any("." in name for name in names) else names
            for batch in file.iter_batches(_ROWS_WITH_MEDIA if media else _ROWS_AT_ONCE, columns=projected):
                begin, end = max(start, first), min(stop, first + batch.num_rows)
                if begin < end:
                    fields = batch.select(names).slice(begin - first, end - begin).to_pylist()
                    yield from enumerate(map(_without_padding, fields), begin + 1)
                first += batch.num_rows
                if first >= stop:
                    break
    except (ArrowException, OSError, ValueError) as error:
        where = f" behind row {first}" if first else ""
        raise DataError(
            f"Cannot read {path}{where}: {' '.join(str(error).split())}",
            hint="Is it a complete Parquet file? Write it again.",
        ) from error


def _without_padding(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_null_members(value) for name, value in row.items()}


def _without_null_members(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null_members(item) for key, item in value.items() if item is not None}
    return [_without_null_members(item) for item in value] if isinstance(value, list) else value


def _columns(
    path: Path, schema: Any, needed: Collection[str], only_needed: bool, media: Collection[str]
) -> list[str]:
    """Return the columns to read.

    :param schema: A pyarrow schema.
    :param media: Columns that may hold bytes.
    """
    names: list[str] = schema.names
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has two columns {name!r}.", hint="Rename one of them.")
    unusable = {
        field.name: str(field.type) for field in schema if not _fits_json(field.type, field.name in media)
    }
    for name in needed:
        if name in unusable:
            raise DataError(
                f"Column {name!r} of {path} is of the type {unusable[name]}, which JSON cannot hold.",
                hint="Write it as text, numbers, or lists and structs of these.",
            )
    if only_needed and set(needed) <= set(names):
        return [name for name in names if name in needed]
    if unusable:
        left_out = ", ".join(f"{name} ({kind})" for name, kind in unusable.items())
        logger.warning("%s: columns that JSON cannot hold are left out: %s", path, left_out)
    return [name for name in names if name not in unusable]


def _fits_json(kind: Any, is_media: bool) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _fits_json(kind.value_type, is_media)
    if types.is_struct(kind):
        return all(_fits_json(kind.field(number).type, is_media) for number in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _fits_json(kind.value_type, is_media)
    known = (types.is_null, types.is_boolean, types.is_integer, types.is_floating)
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    raw = (types.is_binary, types.is_large_binary) if is_media else ()
    return any(holds(kind) for holds in (*known, *texts, *raw))
