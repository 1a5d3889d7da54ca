"""Parsing of model output into reasoning, text and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from anygauge.rollout.gateway.response_parsing import Block, Style, read
from anygauge.rollout.gateway.tool_formats import FORMATS, Called, ToolFormat, find_format
from anygauge_hooks.errors import ConfigError, UnknownNameError

SCHEMAS = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
BEGIN, SEPARATOR, END = (
    f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end")
)
HERMES = Style(think=True, tools=FORMATS["hermes"])
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def read_calls(name: str, text: str) -> list[Called] | None:
    return FORMATS[name].read(text, SCHEMAS)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '{"name": "weather", "arguments": {"city": "7"}}', {"city": "7"}),
        ("hermes", '\n{"name": "weather", "arguments": "{\\"days\\": 2}"}\n', {"days": 2}),
        ("hermes", '[{"name": "weather", "parameters": {}}]', {}),
        (
            "glm",
            "weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>"
            "<arg_value>2</arg_value>\n",
            {"city": "7", "days": 2},
        ),
        ("glm", "weather", {}),
        ("glm", "weather<arg_key>other</arg_key><arg_value>[1]</arg_value>", {"other": [1]}),
        (
            "xml",
            "\n<function=weather>\n<parameter=city>\nParis\nin May\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n",
            {"city": "Paris\nin May", "days": 2},
        ),
        ("xml", "<function=weather></function>", {}),
        ("deepseek", BEGIN + "weather" + SEPARATOR + '{"days": 2}' + END, {"days": 2}),
        (
            "deepseek",
            BEGIN + "function" + SEPARATOR + 'weather\n```json\n{"days": 2}\n```' + END,
            {"days": 2},
        ),
    ],
)
def test_a_call(name: str, text: str, arguments: Any) -> None:
    assert read_calls(name, text) == [Called("weather", arguments)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "{no json}"),
        ("hermes", "[]"),
        ("hermes", '{"name": ""}'),
        ("hermes", '{"name": "f", "arguments": [1]}'),
        ("hermes", '[{"name": "f"}, 3]'),
        ("glm", ""),
        ("glm", '{"name": "f"}'),
        ("glm", "f<arg_key>a</arg_key>"),
        ("xml", "<function=f>text</function>"),
        ("xml", "f"),
        ("deepseek", "f"),
        ("deepseek", ""),
    ],
)
def test_what_cannot_be_read(name: str, text: str) -> None:
    assert read_calls(name, text) is None


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("four", [Block("text", "four")]),
        ("<think>\nwhy\n</think>\n\nfour", [Block("reasoning", "why"), Block("text", "four")]),
        ("<think>why", [Block("reasoning", "why")]),
        ("<think>\n\n</think>\n\nfour", [Block("text", "four")]),
        (
            f"a {CALL}\n{CALL} b",
            [
                Block("text", "a"),
                Block("call", call=Called("f", {"a": 1})),
                Block("call", call=Called("f", {"a": 1})),
                Block("text", "b"),
            ],
        ),
        (f"<think>{CALL}</think>", [Block("reasoning", CALL)]),
        ("<tool_call>x</tool_call>", [Block("text", "<tool_call>x</tool_call>")]),
        ("a <tool_call>x", [Block("text", "a <tool_call>x")]),
        (
            f"<tool_call>x</tool_call>{CALL}",
            [Block("text", "<tool_call>x</tool_call>"), Block("call", call=Called("f", {"a": 1}))],
        ),
    ],
)
def test_parts(text: str, blocks: Sequence[Block]) -> None:
    assert read(text, HERMES) == blocks


def test_reasoning_that_the_prompt_has_opened() -> None:
    style = HERMES._replace(opened=True)
    assert read("why</think>four", style) == [Block("reasoning", "why"), Block("text", "four")]
    assert read("why", style) == [Block("reasoning", "why")]


def test_styles_that_leave_the_text_alone() -> None:
    text = f"<think>why</think> {CALL} "
    assert read(text, Style(think=False)) == [Block("text", text)]
    assert read("one STOP two", Style(think=False, stop=("STOP",))) == [Block("text", "one ")]


OWN = ToolFormat("<<", ">>", lambda text, schemas: [Called(text, {})], "<<")


def test_formats_by_name() -> None:
    assert find_format("auto", "... <tool_call> ... <arg_key>") is FORMATS["glm"]
    assert find_format("auto", "... <tool_call>\n<function=") is FORMATS["xml"]
    assert find_format("auto", "... <tool_call>") is FORMATS["hermes"]
    assert find_format("auto", "...") is None
    assert find_format("none", "<tool_call>") is None
    for wrong in ("yaml", "no_such_module:x", "json:loads"):
        with pytest.raises((ConfigError, UnknownNameError)):
            find_format(wrong, "")


def test_a_format_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("my_formats")
    module.OWN = OWN  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_formats", module)
    found = find_format("my_formats:OWN", "")
    assert read("a <<f>>", Style(think=False, tools=found))[1].call == Called("f", {})
