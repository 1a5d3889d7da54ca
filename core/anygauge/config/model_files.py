"""Whether a Hugging Face directory is complete and of one piece, as far as it shows without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import UnknownNameError

if TYPE_CHECKING:
    from anygauge.plugins import Plugins

__all__ = ["read_model"]

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
LENGTH_BYTES = 8
"""What a safetensors file starts with: the length of its JSON header, little endian."""


def read_model(directory: Path, plugins: Plugins) -> tuple[dict[str, Any] | None, list[str]]:
    """Return ``config.json`` if it can be read, and what is wrong with the directory.

    :param directory: Must exist.
    """
    problems = [*_tokenizer_file(directory), *_weights(directory)]
    path = directory / "config.json"
    if not path.is_file():
        return None, [*problems, "has no config.json"]
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, [*problems, f"needs a readable config.json: {error}"]
    if not isinstance(hf, dict):
        return None, [*problems, "its config.json is not an object"]
    try:
        plugins.model(hf.get("architectures") or ())
    except UnknownNameError as error:
        problems.append(f"{error.args[0]} {error.hint}")
    return hf, [*problems, *_vocabulary(directory, hf)]


def _tokenizer_file(directory: Path) -> Iterator[str]:
    if not any((directory / name).is_file() for name in TOKENIZERS):
        yield f"has no tokenizer: one of {', '.join(TOKENIZERS)}"


def _weights(directory: Path) -> Iterator[str]:
    single, index = (directory / name for name in WEIGHTS)
    if not index.is_file():
        if single.is_file():
            yield from _torn(single)
        else:
            yield f"has no safetensors weights: {' or '.join(WEIGHTS)}"
        return
    try:
        shards = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"its {index.name} cannot be read: {error!r}"
        return
    missing = sorted(shard for shard in shards if not (directory / shard).is_file())
    if missing:
        yield f"lacks {len(missing)} of {len(shards)} weight files, the first is {missing[0]}"
    for shard in sorted(shards.difference(missing)):
        yield from _torn(directory / shard)


def _torn(path: Path) -> Iterator[str]:
    """Compare the length of a safetensors file with what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length) if length <= size else b"")
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        expected = LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        yield f"its {path.name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        yield f"its {path.name} is torn or no safetensors file; copy or download it again"
    else:
        if size != expected:
            yield f"its {path.name} has {size} bytes, its header says {expected}; copy or download it again"


def _vocabulary(directory: Path, hf: Mapping[str, Any]) -> Iterator[str]:
    size, path = hf.get("vocab_size"), directory / "tokenizer.json"
    if not path.is_file():
        return
    try:
        largest = max(_token_ids(json.loads(path.read_text(encoding="utf-8"))), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"its tokenizer.json cannot be read: {error!r}"
        return
    if isinstance(size, int) and largest >= size:
        yield f"its tokenizer.json has token ids up to {largest}, its config.json a vocab_size of only {size}"


def _token_ids(tokenizer: Mapping[str, Any]) -> Iterator[int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, Mapping):
        yield from vocabulary.values()
    else:
        yield from range(len(vocabulary))
    for token in tokenizer.get("added_tokens") or ():
        yield token["id"]
