"""Parse JSON of a bounded depth: that of models, agents and peers strictly, that of files as Python does.

And write what JSON does not know.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NoReturn

__all__ = ["MAX_DEPTH", "MAX_VALUES", "is_nested", "parse_json", "plain_value", "too_deep"]

MAX_DEPTH = 128
"""Deepest nesting of containers. Encoders and chat templates recurse into their input: orjson writes 254
levels, and Python has about 1000 frames, some of which the caller has used."""
MAX_VALUES = 100_000
"""Most values. Empty lists take 21 times the size of their text, and no other thread of the process runs
while the parser, which is in C, makes them: 1.3 s for 8 MiB."""
_EXCERPT = 20
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    # Python reads 1e999 as infinity, which no JSON encoder can write again.
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:_EXCERPT]} is beyond any float")
    return value


def _integer(text: str) -> int:
    # The C decoder parses all numbers without releasing the GIL; a Python callback lets other threads run.
    return int(text)


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer)
_lenient = json.JSONDecoder()


def parse_json(
    text: str | bytes, *, max_depth: int = MAX_DEPTH, max_values: int = MAX_VALUES, strict: bool = True
) -> Any:
    """Return the value of a JSON text that any JSON encoder and UTF-8 can write again.

    Integers keep all their digits, and the last of equal keys counts, as with :func:`json.loads`. NaN,
    Infinity, numbers beyond any float, lone surrogates, deep nesting and very many values are refused, which
    that function accepts.

    :param max_values: Most values, as counted by their commas and opening brackets.
    :param strict: ``False`` takes those, but for the depth: files may have them, as Python writes them.
    :raises ValueError: The text is not such JSON.
    """
    text = text if isinstance(text, str) else text.decode()
    if strict and _has_many_values(text, max_values):
        raise ValueError(f"it has more than {max_values} values")
    try:
        value = (_decoder if strict else _lenient).decode(text)
    except RecursionError:  # a RuntimeError, which callers that expect bad JSON would not catch
        raise too_deep(max_depth) from None
    if text.count("[") + text.count("{") > max_depth and is_nested(value, max_depth):
        raise too_deep(max_depth)
    if strict:
        text.encode()  # UnicodeEncodeError is a ValueError
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    return value


def _has_many_values(text: str, most: int) -> bool:
    """Return whether a JSON text has so many values, without making them."""
    if _num_separators(text) < most:
        return False
    # Those inside of strings do not count. An escaped quote ends no string, unless its backslash is escaped.
    unescaped = text.replace("\\\\", "").replace('\\"', "")
    if unescaped.count('"') > 4 * (most + 1):  # two of a value's key, and two of the value
        return True
    return _num_separators("".join(unescaped.split('"')[::2])) >= most


def _num_separators(text: str) -> int:
    """Return how many values a text can have at most, but for one."""
    return text.count(",") + text.count("[") + text.count("{")


def plain_value(value: Any) -> Any:
    """Return a mapping as a dict, an array as a list, and anything else as text, for ``json.dumps``."""
    if isinstance(value, Mapping):
        return dict(value)
    as_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    return str(value) if as_list is None else as_list()


def is_nested(value: Any, levels: int) -> bool:
    """Return whether lists and tables are nested in more levels.

    Parsers take some 1,000, of which pickle and pydantic give back 500 and 200 as a ``RecursionError``.
    """
    inner = [value] if isinstance(value, (dict, list)) else []
    for _ in range(levels):
        items = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in inner)
        inner = [item for item in items if isinstance(item, (dict, list))]
        if not inner:
            return False
    return bool(inner)


def too_deep(levels: int) -> ValueError:
    """Return the error for JSON with more levels."""
    return ValueError(f"nested too deeply: in more than {levels} levels")
