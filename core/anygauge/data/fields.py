"""Fields of a row: parsed and checked as far as that needs no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from anygauge.config.schema import Data
from anygauge.data.problems import BadRowError
from anygauge.data.template import Message, kind, prompt_problem
from anygauge.strict_json import is_nested

__all__ = ["RowFields"]

_LEVELS = 64
"""Levels of lists and objects in a row, fewer than its readers down to a reward's process take."""


@dataclass(frozen=True, slots=True)
class RowFields:
    """Reads the fields of rows according to a config."""

    config: Data
    is_sft: bool
    media: Mapping[Any, str] | None
    """Field of each kind of media; ``None`` where rows have none."""

    def columns(self) -> tuple[list[str], bool]:
        """Return the fields that the config names, and whether no other is used."""
        config = self.config
        named = (config.input_key, config.label_key, config.metadata_key, config.tools_key)
        return [
            key for key in (*named, *self.media_columns) if key is not None
        ], config.metadata_key is not None

    @property
    def media_columns(self) -> Collection[str]:
        """Fields that hold media."""
        return () if self.media is None else self.media.values()

    def read(self, content: bytes) -> dict[str, Any]:
        """Return the fields of a row, those that are JSON in a string decoded.

        :raises BadRowError: It is no JSON object, or a field that the config names is missing or wrong.
        """
        config = self.config
        fields = self._decoded(_parse_object(content))
        value = _required(fields, config.input_key)
        chats = config.apply_chat_template
        if problem := prompt_problem(value, apply_chat_template=chats, parts=self.media is not None):
            raise BadRowError(f"field {config.input_key!r} {problem}")
        self._check_fields(fields, value)
        return fields

    def metadata(self, fields: dict[str, Any]) -> Mapping[str, Any]:
        """Return what a reward gets of a row's fields beside prompt, label and media."""
        config = self.config
        if config.metadata_key is not None:
            metadata: dict[str, Any] = fields[config.metadata_key]
            return metadata
        used = {config.input_key, config.label_key, *config.multimodal_keys.values()}
        return {key: value for key, value in fields.items() if key not in used}

    def _decoded(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a row with the JSON that is in strings, as Parquet files hold what differs between rows."""
        config = self.config
        decoded = dict(fields)
        for key in (config.metadata_key, config.tools_key):
            if key is not None and isinstance(fields.get(key), str):
                decoded[key] = _from_text(key, fields[key])
        prompt = fields.get(config.input_key)
        if config.apply_chat_template and isinstance(prompt, str) and prompt.startswith("[{"):
            decoded[config.input_key] = _messages_or_text(config.input_key, prompt)
        return decoded

    def _check_fields(self, fields: dict[str, Any], value: str | Sequence[Message]) -> None:
        config = self.config
        if config.label_key is not None and (not self.is_sft or isinstance(value, str)):
            _required(fields, config.label_key)
            if fields[config.label_key] is None:
                raise BadRowError(f"field {config.label_key!r} is null")
        if config.metadata_key is not None:
            metadata = _required(fields, config.metadata_key)
            if not isinstance(metadata, dict):
                raise BadRowError(f"field {config.metadata_key!r} is {kind(metadata)}, not an object")
        if config.tools_key is not None:
            tools = _required(fields, config.tools_key)
            if tools is not None and not _are_objects(tools):
                what = "a list of other things" if isinstance(tools, list) else kind(tools)
                raise BadRowError(f"field {config.tools_key!r} is {what}, not a list of objects")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _required(fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise BadRowError(f"field {key!r} is missing (the row has {', '.join(map(repr, fields)) or 'none'})")
    return fields[key]


# -------------------------------------------------------------------------
# JSON
# -------------------------------------------------------------------------


def _parse_object(content: bytes) -> dict[str, Any]:
    fields = _parse_json(content)
    if not isinstance(fields, dict):
        raise BadRowError("is not a JSON object")
    if b"\\u" in content:
        for key, value in fields.items():
            _check_characters(key, value)
    return fields


def _parse_json(content: bytes) -> Any:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRowError(
            f"is not UTF-8: byte {content[error.start]:#x} at position {error.start}",
            hint="Save the file in UTF-8, such as with `iconv -f ENCODING -t UTF-8 OLD > NEW`.",
        ) from error
    return _parse_text(text)


def _parse_text(text: str) -> Any:
    try:
        # Without its end, or an error there would be in line 2 of 1.
        value = _DECODER.decode(text.rstrip())
    except json.JSONDecodeError as error:
        raise BadRowError(f"is not JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:
        raise BadRowError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRowError("is nested too deeply") from error
    if isinstance(value, dict | list) and is_nested(value, _LEVELS):
        raise BadRowError(f"is nested too deeply: in more than {_LEVELS} levels")
    return value


def _from_text(key: str, text: str) -> Any:
    """Return the JSON that a field holds as a string."""
    try:
        value = _parse_text(text)
    except BadRowError as error:
        raise BadRowError(f"field {key!r} is a string that {error}") from error
    _check_characters(key, value)
    return value


def _messages_or_text(key: str, text: str) -> Any:
    """Return the messages that a string holds as JSON; any other string is what the user says."""
    try:
        value = _from_text(key, text)
    except BadRowError:
        return text
    return value if _are_objects(value) and all("role" in message for message in value) else text


def _refuse_constant(name: str) -> NoReturn:
    raise BadRowError(f"is not JSON, which has no {name}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRowError(f"has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return fields


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)


def _check_characters(key: str, value: Any) -> None:
    """Refuse lone surrogates, which JSON can write and no tokenizer can read."""
    try:
        json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"field {key!r} holds {error.object[error.start]!r}, which is half a character"
        ) from error
