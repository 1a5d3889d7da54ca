"""Data that a program gives as rows: written to the run directory, where a resumed run finds it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anygauge.config.schema import DataFile
from anygauge.config.schema.section import is_name
from anygauge.failures import on_failure
from anygauge_hooks.errors import DataError

__all__ = ["Inputs", "WrittenRows", "is_rows", "is_table"]


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """A file of rows, and what they look like."""

    path: Path
    columns: frozenset[str]
    """Every field that a row has."""
    chats: frozenset[str]
    """Fields that hold lists of messages."""


def is_table(data: object) -> bool:
    """Return whether data is a table of the config, such as ``{"train": ["a.jsonl"]}``.

    :raises DataError: It is a dict of splits, as ``datasets`` loads them.
    """
    if not isinstance(data, Mapping):
        return False
    if any(_is_split(each) for each in data.values()):
        raise _of_splits(data)
    return True


def _of_splits(data: Mapping[str, object]) -> DataError:
    names = [*map(repr, data)]
    return DataError(
        f"The data is a dict of splits: {', '.join(names)}.",
        hint=f"Give one of them, such as data[{names[0]}]; train() takes another as eval_data.",
    )


def _is_split(value: object) -> bool:
    """Return whether a value is rows: a table of the config has paths, or tables with a path, there."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        return False
    if not isinstance(value, list | tuple):
        return True  # a Dataset, a DataFrame or an iterator
    row = value[0] if value else None
    return isinstance(row, Mapping) and "path" not in row and not row.keys() <= DataFile.model_fields.keys()


def is_rows(data: object) -> bool:
    """Return whether data is rows, and not one path or a list of paths.

    :raises DataError: It is neither.
    """
    if isinstance(data, str | Path):
        return False
    if isinstance(data, Mapping):
        raise _of_splits(data)
    if isinstance(data, list | tuple):
        return not (data and all(isinstance(each, str | Path) for each in data))
    if not isinstance(data, Iterable):
        raise DataError(
            f"The data is {type(data).__name__}, which has no rows.",
            hint="Give a list of dicts, a Dataset, a DataFrame, or the path of a JSONL, Parquet or CSV file.",
        )
    return True


@dataclass(slots=True)
class Inputs:
    """Files of rows in one folder. A file is named after its content, so that none is overwritten.

    :param directory: Folder of the files, which is made with the first of them.
    """

    directory: Path
    _written: list[Path] = field(default_factory=list)
    _made: list[Path] = field(default_factory=list)

    def write(self, rows: Iterable[Any], name: str) -> WrittenRows:
        """Write rows as JSON Lines.

        :param name: Begins the name of the file.
        :raises DataError: A row is no mapping, holds what JSON cannot, or the disk refuses.
        """
        columns, chats = set[str](), set[str]()
        digest = hashlib.sha256()
        try:
            self._make_directory()
            with tempfile.NamedTemporaryFile("wb", dir=self.directory, prefix=".", delete=False) as stream:
                partial = Path(stream.name)
                with on_failure(partial.unlink):
                    for number, row in enumerate(_rows(rows)):
                        line = _line(row, f"{name}: row {number}")
                        columns |= {str(key) for key in row}
                        chats |= {str(key) for key, value in row.items() if _is_chat(value)}
                        digest.update(line)
                        stream.write(line)
            if not columns:
                partial.unlink()
                raise DataError(f"{name}: the data has no rows.", hint="Give at least one.")
            # Another name will be refused as the config is checked.
            stem = name if is_name(name) else "rows"
            path = self.directory / f"{stem}-{digest.hexdigest()[:12]}.jsonl"
            if not path.exists():
                self._written.append(path)
            partial.chmod(0o644)
            partial.replace(path)
        except OSError as error:
            raise DataError(
                f"The rows cannot be written to {self.directory}: {error.strerror}.",
                hint="Set run.directory to a directory that you may write to, on a disk with room.",
            ) from error
        return WrittenRows(path, frozenset(columns), frozenset(chats))

    def discard(self, used: str) -> None:
        """Remove what was written, and the folders that were made for it if they are empty.

        :param used: A config; files that it names stay.
        """
        with suppress(OSError):
            for path in self._written:
                if path.name not in used:
                    path.unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()

    def _make_directory(self) -> None:
        missing = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
        self.directory.mkdir(parents=True, exist_ok=True)
        self._made += missing


def _rows(data: Iterable[Any]) -> Iterable[Any]:
    """Return the rows of data; a pandas DataFrame iterates over its columns."""
    if hasattr(data, "columns") and hasattr(data, "to_dict"):
        rows: Iterable[Any] = data.to_dict(orient="records")
        return rows
    return data


def _line(row: Any, where: str) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where} is {type(row).__name__}, not a dict.",
            hint='Give rows such as {"prompt": "37+58=", "label": "95"}.',
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{where} cannot be written as JSON: {error}.",
            hint="Rows hold text, numbers, true, false, null, lists and dicts; give media as paths.",
        ) from error


def _plain(value: Any) -> Any:
    """Return a value of NumPy, pandas or torch, or a path, as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]
    )
