"""Prompts from JSON Lines files.

One pass at the start checks every row, its tokens too, and keeps its byte offset; a row is parsed again when
it is drawn, so that memory holds 20 bytes a row whatever its length. Blank lines are skipped.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from anygauge.config.schema import Config, Data
from anygauge.data.rows import BadRowError, Row, RowReader, read_lines
from anygauge_hooks.errors import DataError
from anygauge_hooks.rl import Prompt

__all__ = ["JsonlSource", "evaluation_data"]

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1000
"""Rows that are tokenized together at the start."""
MAX_REPORTED = 5
"""Bad rows that an error lists."""


def evaluation_data(config: Config) -> Data:
    """Return the settings of ``[data]`` for the files of ``[eval]``."""
    return config.data.model_copy(update={"train": config.eval.data, "shuffle": False})


@dataclass(slots=True)
class _Index:
    """Where each usable row begins."""

    files: array[int] = field(default_factory=lambda: array("I"))
    lines: array[int] = field(default_factory=lambda: array("I"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))

    def append(self, file: int, line: int, offset: int) -> None:
        self.files.append(file)
        self.lines.append(line)
        self.offsets.append(offset)


@dataclass(slots=True)
class _Problems:
    """The first of the bad rows, and how many there are."""

    listed: list[str] = field(default_factory=list)
    hint: str = "Correct the rows, or set data.input_key and data.label_key to the fields they have."
    count: int = 0

    def append(self, place: str, problem: BadRowError) -> None:
        self.count += 1
        if self.count == 1:
            self.hint = problem.hint or self.hint
        if self.count <= MAX_REPORTED:
            self.listed.append(f"{place}: {problem}")

    def report(self, num_rows: int) -> NoReturn:
        more = self.count - len(self.listed)
        listed = [*self.listed, *([f"... and {more} more"] if more else [])]
        raise DataError(
            f"{self.count} of {num_rows} rows cannot be used:\n  " + "\n  ".join(listed), hint=self.hint
        )


class JsonlSource:
    """Draws prompts from JSON Lines files, epoch after epoch.

    Two sources with the same files, settings and seed draw the same prompts.

    :param config: Files and how to read them.
    :param tokenizer: A Hugging Face tokenizer.
    :param seed: Seeds the order of each epoch.
    :param max_tokens: Of a prompt that the model can take; ``None`` for any number. Unlike a prompt longer
        than ``max_prompt_tokens``, which is dropped, a longer one is bad.
    :raises DataError: A file cannot be read, a row is bad, or no row is left; lists the first bad rows.
    """

    def __init__(self, config: Data, tokenizer: Any, seed: int = 0, *, max_tokens: int | None = None) -> None:
        self._config = config
        self._reader = RowReader(config, tokenizer, max_tokens)
        self._seed = seed
        self._index = _Index()
        self._epoch = 0
        self._cursor = 0
        self.num_dropped = 0
        """Rows that were longer than ``max_prompt_tokens``."""
        self._build_index()
        self._order = self._make_order()

    def __len__(self) -> int:
        return len(self._index.offsets)

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts. At the end of an epoch the next one begins, in a new order."""
        positions = []
        for _ in range(num_prompts):
            if self._cursor == len(self):
                self._epoch += 1
                self._cursor = 0
                self._order = self._make_order()
            positions.append(self._order[self._cursor])
            self._cursor += 1
        return self._read(positions)

    def all(self, limit: int | None = None) -> list[Prompt]:
        """Return every prompt once, in the order of the files.

        :param limit: Only the first prompts; ``None`` for all.
        """
        return self._read(range(len(self))[:limit])

    def _make_order(self) -> array[int]:
        order = array("I", range(len(self)))
        if self._config.shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def _build_index(self) -> None:
        if not self._config.train:
            raise DataError("No data file is given.", hint="List at least one in data.train.")
        problems = _Problems()
        num_rows = 0
        for file, path in enumerate(self._config.train):
            rows_before, lines = num_rows, read_lines(path)
            while chunk := list(islice(lines, ROWS_AT_ONCE)):
                num_rows += len(chunk)
                rows = self._reader.read([content for _, _, content in chunk])
                for (line, offset, _), row in zip(chunk, rows, strict=True):
                    if isinstance(row, BadRowError):
                        problems.append(f"{path}:{line}", row)
                    elif len(row.tokens) > (self._config.max_prompt_tokens or len(row.tokens)):
                        self.num_dropped += 1
                    else:
                        self._index.append(file, line, offset)
            if num_rows == rows_before:
                raise DataError(f"{path} has no rows.", hint="Write one JSON object per line.")
        if problems.count:
            problems.report(num_rows)
        self._report_dropped(num_rows)

    def _report_dropped(self, num_rows: int) -> None:
        if not len(self):
            raise DataError(
                f"All {num_rows} prompts are longer than data.max_prompt_tokens = "
                f"{self._config.max_prompt_tokens}.",
                hint="Raise data.max_prompt_tokens.",
            )
        if self.num_dropped:
            logger.warning("dropped %d of %d prompts for their length", self.num_dropped, num_rows)

    def _read(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts of rows, tokenized in one call."""
        rows = self._reader.read([self._content(position) for position in positions])
        return [self._prompt(position, row) for position, row in zip(positions, rows, strict=True)]

    def _place(self, position: int) -> tuple[Path, int]:
        """Return file and line of a row."""
        return self._config.train[self._index.files[position]], self._index.lines[position]

    def _content(self, position: int) -> bytes:
        path, _ = self._place(position)
        try:
            with path.open("rb") as stream:
                stream.seek(self._index.offsets[position])
                return stream.readline()
        except OSError as error:
            raise self._changed(position, error) from error

    def _changed(self, position: int, error: Exception) -> DataError:
        """Return the error of a row that was good at the start."""
        path, line = self._place(position)
        return DataError(f"{path}:{line}: {error}", hint="The file changed while the run was reading it.")

    def _prompt(self, position: int, row: Row | BadRowError) -> Prompt:
        if isinstance(row, BadRowError):
            raise self._changed(position, row)
        config, (path, line) = self._config, self._place(position)
        used = {config.input_key, config.label_key}
        return Prompt(
            index=position,
            tokens=row.tokens,
            text=row.text,
            label=None if config.label_key is None else row.fields[config.label_key],
            source=f"{path}:{line}",
            metadata={key: value for key, value in row.fields.items() if key not in used},
        )
