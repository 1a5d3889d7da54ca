"""JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.strict_json import MAX_DEPTH, MAX_VALUES, parse_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        (b'{"a": [1, 2.5, null, true, "\xc3\xa4"]}', {"a": [1, 2.5, None, True, "ä"]}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ("9" * 40, int("9" * 40)),
        ('"\\ud83d\\ude42"', "\N{SLIGHTLY SMILING FACE}"),
        (json.dumps("[" * 5000), "[" * 5000),
    ],
)
def test_json(text: str | bytes, value: Any) -> None:
    assert parse_json(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "NaN",
            "[Infinity]",
            "-Infinity",
            "1e999",
            "[-1e400]",
            "9" * 5000,
            '"\\ud800"',
            '"\ud800"',
            '"\\uDFFF\\ud800"',
        ),
        *(b"\xff", b'"\xed\xa0\x80"', "\ufeff1", "'a'", "1 2"),
    ],
)
def test_what_is_no_json(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each decoder has words of its own
        parse_json(text)


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_depth_has_a_bound_that_every_encoder_can_write(begin: str, end: str) -> None:
    whole = MAX_DEPTH // len(end)
    deepest = begin * whole + "1" + end * whole
    orjson.dumps(parse_json(deepest))
    for depth in (whole + 1, 2000, 40_000):
        with pytest.raises(ValueError, match="nested too deeply: in more than 128 levels"):
            parse_json(begin * depth + "1" + end * depth)
    with pytest.raises(ValueError, match="in more than 3 levels"):
        parse_json("[[[[]]]]", max_depth=3)
    assert parse_json("[[[1], {}]]", max_depth=3) == [[[1], {}]]


def num_separators(value: Any) -> int:
    """Return how many commas and opening brackets a value is written with, outside of strings."""
    if not isinstance(value, (dict, list)):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(len(inner) - 1, 0) + sum(map(num_separators, inner))


ODD_TEXT = st.text(alphabet='",[{\\\n\xe9a', max_size=6)
JSON = st.recursive(
    ODD_TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD_TEXT, inner, max_size=4),
)


@given(JSON, st.integers(min_value=0, max_value=12), st.booleans())
def test_values_are_bounded_and_separators_in_strings_are_none(value: Any, most: int, ascii_: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_)
    if num_separators(value) < most:
        assert parse_json(text, max_values=most) == value
        return
    with pytest.raises(ValueError, match=f"has more than {most} values"):
        parse_json(text, max_values=most)


def test_many_small_values_are_refused_and_a_long_text_is_not() -> None:
    """A short text of small values takes seconds in which no other thread runs, and 21 times its size."""
    for many in ("[],", "{},", "0,", '"",', '"\\\\",'):
        with pytest.raises(ValueError, match="has more than 100000 values"):
            parse_json("[" + many * MAX_VALUES + "0]")
    rows = '"a",[{}]\\n' * MAX_VALUES
    assert parse_json(json.dumps([rows, rows])) == [rows, rows]
    assert len(parse_json("[" + "0," * MAX_VALUES + "0]", strict=False)) == MAX_VALUES + 1, "files may"


def test_files_may_have_what_python_writes_into_them() -> None:
    found = parse_json('[NaN, -Infinity, "\\ud800"]', strict=False)
    assert [repr(each) for each in found] == ["nan", "-inf", "'\\ud800'"]
    for depth in (MAX_DEPTH + 1, 200_000):
        with pytest.raises(ValueError, match="nested too deeply: in more than 128 levels"):
            parse_json("[" * depth + "]" * depth, strict=False)
