"""Fingerprint of a tokenizer."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["tokenizer_fingerprint"]

_digests: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
"""Digests of tokenizers, each with the size of its vocabulary: a cache, since they are slow to compute and
several data sets share a tokenizer."""


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Return a digest of all that decides how a tokenizer reads texts and chats.

    :param tokenizer: A Hugging Face tokenizer.
    :returns: ``None`` if that cannot be known, as it is with one that is not of the ``tokenizers`` library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    size, content = _digests.get(tokenizer, (0, ""))
    if size != len(tokenizer):
        content = _content(backend)
        _digests[tokenizer] = len(tokenizer), content
    facts = {
        "class": type(tokenizer).__qualname__,
        "content": content,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "split": bool(getattr(tokenizer, "split_special_tokens", False)),
        "template": tokenizer.chat_template,
        "versions": [version("transformers"), version("tokenizers")],
    }
    return _digest(facts)


def _content(backend: Any) -> str:
    """Return a digest of what ``tokenizer.json`` holds."""
    content = json.loads(backend.to_str())
    for setting in ("truncation", "padding"):
        content.pop(setting, None)  # every call sets them anew
    return _digest(content)


def _digest(facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
