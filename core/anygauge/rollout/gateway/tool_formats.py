"""Formats of tool calls: one parser for each, chosen by name or from the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from anygauge.plugins import imported
from anygauge.strict_json import parse_json
from anygauge_hooks.errors import ConfigError

__all__ = ["FORMATS", "Called", "ToolFormat", "find_format"]

Schemas = Mapping[str, Any]
_MAX_DEPTH = 100
"""Deepest nesting of arguments. It is below the gateway's own limit, since an agent sends a call back inside
a request."""


class Called(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: Any
    """An object, of plain JSON values."""


class ToolFormat(NamedTuple):
    """Format of tool calls: their markers in a text, and the parser."""

    start: str
    end: str
    read: Callable[[str, Schemas], list[Called] | None]
    """From what is between the two, and each tool's parameters as JSON schema, to the calls; ``None`` where
    it cannot be read, and then it stays text."""
    sign: str
    """Text by which a chat template that teaches the format is recognized."""


def _hermes(text: str, schemas: Schemas) -> list[Called] | None:
    """Read ``{"name": ..., "arguments": {...}}``, or a list of such."""
    try:
        value = parse_json(text, max_depth=_MAX_DEPTH)
    except ValueError:
        return None
    parsed = [_json_call(each) for each in (value if isinstance(value, list) else [value])]
    calls = [each for each in parsed if each is not None]
    return calls if calls and len(calls) == len(parsed) else None


def _json_call(value: Any) -> Called | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments, max_depth=_MAX_DEPTH)
        except ValueError:
            return None
    return Called(value["name"], arguments) if isinstance(arguments, dict) else None


# The group is atomic: where no value follows the first </arg_key>, a later one is not tried, which would make
# the time grow with the square of the text.
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(?>(.*?)</arg_key>)\s*<arg_value>(.*?)</arg_value>\s*", re.S)


def _glm(text: str, schemas: Schemas) -> list[Called] | None:
    """Read ``name`` and pairs of ``<arg_key>`` and ``<arg_value>``."""
    name, separator, rest = text.partition("<arg_key>")
    return _tagged(name.strip(), _GLM_ARGUMENT, separator + rest, schemas)


_XML_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.S)
_XML_ARGUMENT = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.S)


def _xml(text: str, schemas: Schemas) -> list[Called] | None:
    """Read ``<function=name>`` with a ``<parameter=key>`` for each argument."""
    call = _XML_CALL.fullmatch(text)
    return None if call is None else _tagged(call[1], _XML_ARGUMENT, call[2], schemas)


def _mark(name: str) -> str:
    """Return a special token of DeepSeek's, which is written with a wide bar and a low block."""
    return f"<\uff5ctool\u2581{name}\uff5c>"


_CALLS = _mark("calls\u2581begin"), _mark("calls\u2581end")
_CALL = _mark("call\u2581begin"), _mark("call\u2581end")
_SEPARATOR = _mark("sep")
_DEEPSEEK_CALL = re.compile(
    rf"\s*{_CALL[0]}(?:function{_SEPARATOR})?([^<\n]+?)"
    rf"(?:{_SEPARATOR}|\n```json\n)(.*?)(?:\n```)?{_CALL[1]}\s*",
    re.S,
)


def _deepseek(text: str, schemas: Schemas) -> list[Called] | None:
    """Read calls that each have markers of their own around name and JSON."""
    matches = list(_each(_DEEPSEEK_CALL, text))
    calls = [_json_call({"name": call[1], "arguments": call[2]}) for call in matches]
    whole = bool(matches) and matches[-1].end() == len(text)
    return [call for call in calls if call is not None] if whole and None not in calls else None


def _tagged(name: str, argument: re.Pattern[str], text: str, schemas: Schemas) -> list[Called] | None:
    if not name or any(sign in name for sign in "<>{}\n"):
        return None
    arguments, at = {}, 0
    for match in _each(argument, text):
        arguments[match[1].strip()] = _typed(match[2], _schema_of(schemas, name, match[1].strip()))
        at = match.end()
    return [Called(name, arguments)] if not text[at:].strip() else None


def _each(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield matches that follow each other without a gap."""
    at = 0
    while at < len(text) and (match := pattern.match(text, at)):
        yield match
        at = match.end()


def _schema_of(schemas: Schemas, name: str, key: str) -> Mapping[str, Any]:
    schema: Any = schemas.get(name)
    for step in ("properties", key):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a text: itself where the schema says string, else JSON if it is some."""
    if schema.get("type") == "string":
        return text
    try:
        return parse_json(text, max_depth=_MAX_DEPTH)
    except ValueError:
        return text


FORMATS: Mapping[str, ToolFormat] = {
    # The most particular first: some stand between the same markers.
    "glm": ToolFormat("<tool_call>", "</tool_call>", _glm, "<arg_key>"),
    "xml": ToolFormat("<tool_call>", "</tool_call>", _xml, "<function="),
    "deepseek": ToolFormat(*_CALLS, _deepseek, _CALLS[0]),
    "hermes": ToolFormat("<tool_call>", "</tool_call>", _hermes, "<tool_call>"),
}
"""``hermes`` is Qwen2.5's and Qwen3's, ``xml`` Qwen3-Coder's and Qwen3.5's, ``glm`` GLM-4.5's, and
``deepseek`` V3's and R1's."""


def find_format(name: str, template: str) -> ToolFormat | None:
    """Return a format.

    :param name: A key of :data:`FORMATS`, ``package.module:attribute`` with a :class:`ToolFormat`, ``none``,
        or ``auto``, which takes what the template teaches.
    :raises ConfigError: There is no such format.
    :raises UnknownNameError: It cannot be imported.
    """
    if name == "none":
        return None
    if name == "auto":
        return next((each for each in FORMATS.values() if each.sign in template), None)
    tool_format = FORMATS.get(name) or (imported(name, "Tool format") if ":" in name else None)
    if not isinstance(tool_format, ToolFormat):
        raise ConfigError(
            f"rollout.gateway.tool_format = {name!r} is not a tool-call format.",
            hint=f"Take auto, none, {', '.join(FORMATS)}, or package.module:attribute with a ToolFormat.",
        )
    return tool_format
