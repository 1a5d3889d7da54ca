"""Texts of single tokens, to show a response token by token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

__all__ = ["Decode", "token_decoder", "token_texts"]

Decode = Callable[[Sequence[int]], str]
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_log = logging.getLogger(__name__)


@cache
def token_decoder(model: Path) -> Decode | None:
    """Return the decoder of a model's ``tokenizer.json``; ``None`` where there is none that can be read.

    :param model: Directory of the model.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - foreign code: tokenizers raises nothing narrower
        _log.info("samples are recorded without their tokens: %s", error)
        return None
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds.

    A token is decoded behind the one before it, on which its leading space may depend. Tokens that end within
    a character add nothing, and the one that ends it adds it.
    """
    texts: list[str] = []
    start = end = 0
    for index in range(len(tokens)):
        before, now = decode(tokens[start:end]), decode(tokens[start : index + 1])
        is_whole = len(now) > len(before) and not now.endswith(_INCOMPLETE)
        texts.append(now[len(before) :] if is_whole else "")
        if is_whole:
            start, end = end, index + 1
    return texts
