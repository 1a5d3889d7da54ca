"""Parse JSON written by a model, an agent or a peer."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

__all__ = ["MAX_DEPTH", "parse_json"]

MAX_DEPTH = 128
"""Of nested containers. Encoders and chat templates recurse into what they are given: orjson writes 254
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


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text that any JSON encoder and UTF-8 can write again.

    Integers keep all their digits, and the last of equal keys counts, as with :func:`json.loads`. NaN,
    Infinity, numbers beyond any float, lone surrogates and deep nesting are refused, which that function
    accepts.

    :raises ValueError: The text is not such JSON.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        value = _decoder.decode(text)
    except RecursionError:  # a RuntimeError, which callers that expect bad JSON would not catch
        raise _too_deep(max_depth) from None
    if text.count("[") + text.count("{") > max_depth:
        _check_depth(value, max_depth)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _check_depth(value: Any, max_depth: int) -> None:
    level: list[Any] = [[value]]
    for _ in range(max_depth + 1):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> ValueError:
    return ValueError(f"nested deeper than {max_depth} levels")
