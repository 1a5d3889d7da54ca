"""Prompts from JSON Lines files.

One pass at the start checks every row and keeps its byte offset; a row is parsed again when it is drawn, so
that memory holds 20 bytes a row whatever its length. Blank lines are skipped.
"""

from __future__ import annotations

import json
import logging
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from anygauge.config.schema import Config, Data
from anygauge.data.template import prompt_problem, render, tokenize
from anygauge_hooks.errors import DataError
from anygauge_hooks.rl import Prompt

__all__ = ["JsonlSource", "evaluation_data"]

logger = logging.getLogger(__name__)

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


class JsonlSource:
    """Draws prompts from JSON Lines files, epoch after epoch.

    Two sources with the same files, settings and seed draw the same prompts.

    :param config: Files and how to read them.
    :param tokenizer: A Hugging Face tokenizer.
    :param seed: Seeds the order of each epoch.
    :raises DataError: A file cannot be read, a row is bad, or no row is left; lists the first bad rows.
    """

    def __init__(self, config: Data, tokenizer: Any, seed: int = 0) -> None:
        self._config = config
        self._tokenizer = tokenizer
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
        problems: list[str] = []
        num_rows = 0
        for file, path in enumerate(self._config.train):
            rows_before = num_rows
            for line, offset, content in _lines(path):
                num_rows += 1
                try:
                    keep = self._fits(_parse(content, self._config), path, line)
                except _BadRowError as error:
                    problems.append(f"{path}:{line}: {error}")
                    continue
                if keep:
                    self._index.append(file, line, offset)
            if num_rows == rows_before:
                raise DataError(f"{path} has no rows.", hint="Write one JSON object per line.")
        self._report(problems, num_rows)

    def _fits(self, row: dict[str, Any], path: Path, line: int) -> bool:
        """Return whether a row is short enough; what the chat template refuses is an error already."""
        limit = self._config.max_prompt_tokens
        if limit is None and not self._config.apply_chat_template:
            return True
        text = self._render(row, path, line)
        if limit is None:
            return True
        [tokens] = tokenize([text], self._tokenizer, self._config)
        fits = len(tokens) <= limit
        self.num_dropped += not fits
        return fits

    def _report(self, problems: list[str], num_rows: int) -> None:
        if problems:
            more = len(problems) - MAX_REPORTED
            listed = [*problems[:MAX_REPORTED], *([f"... and {more} more"] if more > 0 else [])]
            raise DataError(
                f"{len(problems)} of {num_rows} rows cannot be used:\n  " + "\n  ".join(listed),
                hint="Correct the rows, or set data.input_key and data.label_key to the fields they have.",
            )
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
        rows = [self._row(position) for position in positions]
        texts = [
            self._render(row, *self._place(position)) for position, row in zip(positions, rows, strict=True)
        ]
        tokens = tokenize(texts, self._tokenizer, self._config) if texts else []
        return [self._prompt(*parts) for parts in zip(positions, rows, texts, tokens, strict=True)]

    def _place(self, position: int) -> tuple[Path, int]:
        """Return file and line of a row."""
        return self._config.train[self._index.files[position]], self._index.lines[position]

    def _row(self, position: int) -> dict[str, Any]:
        path, line = self._place(position)
        try:
            with path.open("rb") as stream:
                stream.seek(self._index.offsets[position])
                return _parse(stream.readline(), self._config)
        except (OSError, _BadRowError) as error:
            raise DataError(
                f"{path}:{line}: {error}", hint="The file changed while the run was reading it."
            ) from error

    def _prompt(self, position: int, row: dict[str, Any], text: str, tokens: list[int]) -> Prompt:
        config, (path, line) = self._config, self._place(position)
        if not tokens:
            key = config.input_key
            raise DataError(
                f"{path}:{line}: field {key!r}: the tokenizer makes no token of {text!r}.",
                hint="Write something into the field, or delete the row.",
            )
        used = {config.input_key, config.label_key}
        return Prompt(
            index=position,
            tokens=tuple(tokens),
            text=text,
            label=None if config.label_key is None else row[config.label_key],
            source=f"{path}:{line}",
            metadata={key: value for key, value in row.items() if key not in used},
        )

    def _render(self, row: dict[str, Any], path: Path, line: int) -> str:
        key = self._config.input_key
        try:
            return render(row[key], self._tokenizer, self._config)
        except TemplateError as error:
            raise DataError(
                f"{path}:{line}: field {key!r}: the chat template refuses it: {error}",
                hint="The template's rules are in the model directory's chat_template.jinja.",
            ) from error


class _BadRowError(Exception):
    """What is wrong with a row, as a clause."""


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield line number (from 1), byte offset and content of each line that is not blank."""
    offset = 0
    try:
        with path.open("rb") as stream:
            for line, content in enumerate(stream, 1):
                if content.strip():
                    yield line, offset, content
                offset += len(content)
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror}.",
            hint="data.train and eval.data are lists of JSONL files.",
        ) from error


def _parse(content: bytes, config: Data) -> dict[str, Any]:
    """Return a row whose prompt and label can be used."""
    try:
        row = json.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise _BadRowError(f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _BadRowError("is not a JSON object")
    for key in (config.input_key, config.label_key):
        if key is not None and key not in row:
            raise _BadRowError(
                f"field {key!r} is missing (the row has {', '.join(map(repr, row)) or 'none'})"
            )
    problem = prompt_problem(row[config.input_key], apply_chat_template=config.apply_chat_template)
    if problem:
        raise _BadRowError(f"field {config.input_key!r} {problem}")
    if config.label_key is not None and row[config.label_key] is None:
        raise _BadRowError(f"field {config.label_key!r} is null")
    return row
