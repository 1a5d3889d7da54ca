"""Parsing of model output: whole, and while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anygauge.rollout.gateway.detokenizer import Detokenizer
from anygauge.rollout.gateway.rendering import Renderer
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
    assert read(text, HERMES, final=True) == blocks


def test_reasoning_that_the_prompt_has_opened() -> None:
    style = HERMES._replace(opened=True)
    assert read("why</think>four", style, final=True) == [Block("reasoning", "why"), Block("text", "four")]
    assert read("why", style, final=True) == [Block("reasoning", "why")]


def test_styles_that_leave_the_text_alone() -> None:
    text = f"<think>why</think> {CALL} "
    assert read(text, Style(think=False), final=True) == [Block("text", text)]
    assert read("one STOP two", Style(think=False, stop=("STOP",)), final=True) == [Block("text", "one ")]


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    "a",
    " ",
    "\n",
    "<",
    "{",
    "STOP",
    "ST",
    "é",
]


@settings(max_examples=60)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    opened=st.booleans(),
    stop=st.sampled_from([(), ("STOP",), ("STOP", "</tool_call>")]),
)
def test_parts_only_grow(pieces: list[str], opened: bool, stop: tuple[str, ...]) -> None:
    style = HERMES._replace(opened=opened, stop=stop)
    text, before = "".join(pieces), list[Block]()
    whole = read(text, style, final=True)
    for end in range(len(text) + 1):
        blocks = read(text[:end], style, final=False)
        for shorter, longer in zip(before, blocks, strict=False):
            assert (shorter.kind, shorter.call) == (longer.kind, longer.call)
            assert longer.text.startswith(shorter.text)
        assert len(blocks) >= len(before)
        before = blocks
    for shorter, longer in zip(before, whole, strict=False):
        assert (shorter.kind, shorter.call) == (longer.kind, longer.call)
        assert longer.text.startswith(shorter.text)
    assert len(whole) >= len(before)


@settings(max_examples=30)
@given(text=st.text(alphabet="ab é€🙂\n", max_size=20))
def test_text_of_tokens_that_come_one_by_one(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    follower = Detokenizer(Renderer(tokenizer))
    texts = [follower.text(tokens[:end]) for end in range(len(tokens) + 1)]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    assert texts[-1] == tokenizer.decode(tokens)


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
    assert read("a <<f>>", Style(think=False, tools=found), final=True)[1].call == Called("f", {})
