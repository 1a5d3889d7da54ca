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

__all__ = ["MAX_DEPTH", "is_nested", "parse_json", "plain_value", "too_deep"]

MAX_DEPTH = 128
"""Deepest nesting of containers. Encoders and chat templates recurse into their input: orjson writes 254
levels, and Python has about 1000 frames, some of which the caller has used."""
_EXCERPT = 20
_SURROGATE = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    # Python reads 1e999 as infinity, which no JSON encoder can write again.
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:_EXCERPT]} is beyond any float")
    return value


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_lenient = json.JSONDecoder()


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH, strict: bool = True) -> Any:
    """Return the value of a JSON text that any JSON encoder and UTF-8 can write again.

    Integers keep all their digits, and the last of equal keys counts, as with :func:`json.loads`. NaN,
    Infinity, numbers beyond any float, lone surrogates and deep nesting are refused, which that function
    accepts.

    :param strict: ``False`` takes those, but for the depth: files may have them, as Python writes them.
    :raises ValueError: The text is not such JSON.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        value = (_decoder if strict else _lenient).decode(text)
    except RecursionError:  # a RuntimeError, which callers that expect bad JSON would not catch
        raise too_deep(max_depth) from None
    if text.count("[") + text.count("{") > max_depth and is_nested(value, max_depth):
        raise too_deep(max_depth)
    if strict and _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


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
