"""From the lines of JSON Lines files to rows whose prompt and label can be used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError

from anygauge.config.schema import Data
from anygauge.data.template import prompt_problem, render, tokenize
from anygauge_hooks.errors import DataError

__all__ = ["BadRowError", "Row", "RowReader", "read_lines"]

_EXCERPT = 60
"""Characters of a prompt that an error shows."""


class BadRowError(Exception):
    """What is wrong with a row, as a clause.

    :param hint: What to do about it, if it is not to correct the row.
    """

    def __init__(self, problem: str, *, hint: str | None = None) -> None:
        super().__init__(problem)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be used."""

    fields: dict[str, Any]
    text: str
    """The prompt as the policy sees it."""
    tokens: tuple[int, ...]


def read_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield line number (from 1), byte offset and content of each line that is not blank.

    :raises DataError: The file cannot be read.
    """
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


class RowReader:
    """Reads rows as a config says.

    :param tokenizer: A Hugging Face tokenizer.
    :param max_tokens: A prompt with more is bad, unless ``max_prompt_tokens`` drops it; ``None`` for any
        number.
    """

    def __init__(self, config: Data, tokenizer: Any, max_tokens: int | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def read(self, contents: Sequence[bytes]) -> list[Row | BadRowError]:
        """Return each row, or what is wrong with it. They are tokenized in one call."""
        rendered = [self._render(content) for content in contents]
        texts = [row[1] for row in rendered if not isinstance(row, BadRowError)]
        tokens = iter(self._tokenize(texts) if texts else ())
        return [row if isinstance(row, BadRowError) else self._row(*row, next(tokens)) for row in rendered]

    def _render(self, content: bytes) -> tuple[dict[str, Any], str] | BadRowError:
        try:
            fields = _parse_row(content, self._config)
            return fields, render(fields[self._config.input_key], self._tokenizer, self._config)
        except BadRowError as problem:
            return problem.with_traceback(None)
        except TemplateError as error:
            return self._bad_prompt(
                f": the chat template refuses it: {error}",
                hint="The template's rules are in the model directory's chat_template.jinja.",
            )

    def _tokenize(self, texts: Sequence[str]) -> list[list[int] | BadRowError]:
        try:
            return list(tokenize(texts, self._tokenizer, self._config))
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower
            if len(texts) > 1:
                return [result for text in texts for result in self._tokenize([text])]
            return [
                self._bad_prompt(
                    f": the tokenizer refuses {_excerpt(texts[0])}: {error}",
                    hint="Correct the rows, or use a tokenizer that knows all of their characters.",
                )
            ]

    def _row(self, fields: dict[str, Any], text: str, tokens: list[int] | BadRowError) -> Row | BadRowError:
        if isinstance(tokens, BadRowError):
            return tokens
        if not tokens:
            return self._bad_prompt(f": the tokenizer makes no token of {_excerpt(text)}")
        kept = len(tokens) <= (self._config.max_prompt_tokens or len(tokens))
        if kept and self._max_tokens is not None and len(tokens) > self._max_tokens:
            return self._bad_prompt(
                f" has {len(tokens)} tokens; beside its response the model has room for {self._max_tokens}",
                hint="Set data.max_prompt_tokens to drop longer prompts, or let responses be shorter.",
            )
        return Row(fields, text, tuple(tokens))

    def _bad_prompt(self, problem: str, *, hint: str | None = None) -> BadRowError:
        return BadRowError(f"field {self._config.input_key!r}{problem}", hint=hint)


def _excerpt(text: str) -> str:
    return repr(text[:_EXCERPT] + ("..." if len(text) > _EXCERPT else ""))


def _parse_row(content: bytes, config: Data) -> dict[str, Any]:
    """Return a row whose prompt and label can be used, but for the prompt's tokens."""
    row = _parse_json(content)
    if not isinstance(row, dict):
        raise BadRowError("is not a JSON object")
    for key in (config.input_key, config.label_key):
        if key is None:
            continue
        if key not in row:
            raise BadRowError(f"field {key!r} is missing (the row has {', '.join(map(repr, row)) or 'none'})")
        _check_characters(key, row[key])
    problem = prompt_problem(row[config.input_key], apply_chat_template=config.apply_chat_template)
    if problem:
        raise BadRowError(f"field {config.input_key!r} {problem}")
    if config.label_key is not None and row[config.label_key] is None:
        raise BadRowError(f"field {config.label_key!r} is null")
    return row


def _parse_json(content: bytes) -> Any:
    try:
        # Without its end, or an error there would be in line 2 of 1.
        text = content.decode("utf-8-sig").rstrip()
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise BadRowError(f"is not JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:
        raise BadRowError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRowError("is nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise BadRowError(f"is not JSON, which has no {name}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRowError(f"has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def _check_characters(key: str, value: Any) -> None:
    """Refuse lone surrogates, which JSON can write and no tokenizer can read."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"field {key!r} holds {error.object[error.start]!r}, which is half a character"
        ) from error
