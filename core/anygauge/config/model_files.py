"""Check that a Hugging Face directory is complete and consistent, as far as it shows without torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.families import family
from anygauge.config.roles import as_language_model
from anygauge.config.rules.file import no_directory
from anygauge.disk import read_json
from anygauge.hub.files import TOKENIZERS
from anygauge.hub.names import did_you_mean
from anygauge.hub.weight_files import INDEX, SINGLE, weight_names
from anygauge.strict_json import parse_json
from anygauge_hooks.errors import ConfigError, UnknownNameError
from anygauge_hooks.models import text_config, transformers_model

if TYPE_CHECKING:
    from anygauge.plugins import Plugins

__all__ = ["missing_parts", "other_tokens", "read_model"]

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Exceptions raised by reading a malformed JSON file."""

_log = logging.getLogger(__name__)

POINTER = b"version https://git-lfs"
"""Starts a file that Git LFS has not downloaded yet."""
LENGTH_BYTES = 8
"""Size of the length field at the start of a safetensors file: its JSON header's length, little endian."""


def missing_parts(directory: Path) -> list[str]:
    """Return why a path is no whole model, as clauses: what it is instead, and which files it lacks."""
    if os.path.isfile(directory):  # Path.is_file raises where a name is too long
        return ["is a file; name the Hugging Face directory of a model"]
    if not os.path.isdir(directory):
        if directory.is_absolute():
            return [f"there is no directory of that path{did_you_mean(directory)}"]
        return [f"not a name on a hub, which is OWNER/NAME, and {no_directory(directory)}"]
    has_config = (directory / "config.json").is_file()
    if not has_config and (other := _other_kind(directory)):
        return [other]
    config = [] if has_config else ["has no config.json"]
    return [*config, *_tokenizer_file(directory), *_weights(directory)]


def read_model(
    directory: Path,
    plugins: Plugins,
    *,
    engine: str | None = None,
    trust_remote_code: bool = False,
    is_critic: bool = False,
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the config of the text model, if it can be read, and the problems of the directory's files.

    What is missing is no problem here: see :func:`missing_parts`.

    :param engine: Name of the train engine; ``None`` takes registered families alone.
    :param trust_remote_code: Whether Python files of the directory may run.
    :param is_critic: Whether it may be a classifier with one label; it is returned as a language model.
    """
    path = directory / "config.json"
    if not path.is_file():
        return None, []
    if (directory / SINGLE).is_file() and (directory / INDEX).is_file():
        _log.warning("%s: %s is read, as transformers does, and not %s", directory, SINGLE, INDEX)
    problems: list[str] = []
    try:
        hf = read_json(path)
    except (OSError, ValueError) as error:
        return None, [f"needs a readable config.json: {error}"]
    if not isinstance(hf, dict):
        return None, ["its config.json is not an object"]
    try:
        hf = as_language_model(hf) if is_critic else hf
        builds = transformers_model(family(plugins, hf, engine)) is not None
    except UnknownNameError as error:
        builds = False
        problems.append(f"{error.args[0]} {error.hint}")
    except ConfigError as error:
        return None, [f"{error.args[0]} {error.hint}"]
    if not trust_remote_code:
        problems += _code(directory, {} if builds else hf)
    text = dict(text_config(hf))
    return text, [*problems, *_vocabulary(directory, text)]


def _other_kind(directory: Path) -> str:
    """Return what a directory without ``config.json`` is, and what to name instead; empty if unknown."""
    if (directory / "adapter_config.json").is_file():
        return "is an adapter of peft; name its base model, and the adapter in train.lora.path"
    if (directory / "manifest.json").is_file():
        return "is a checkpoint of a run; `anygauge convert --to-hf DIR OUT` writes its model"
    if (directory / "config.toml").is_file():
        return f"is a run; the model that it wrote at its end is in {directory / 'hf'}"
    return ""


def _code(directory: Path, hf: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a model that need the directory's own Python files.

    :param hf: Its config; empty if a family builds the model without them.
    """
    allow = "set model.trust_remote_code = true if you trust its author; its Python files then run here"
    if _auto_map(hf) and not _is_known(hf.get("model_type")):
        yield (
            f"needs code of its own: auto_map in its config.json names {_auto_map(hf)}, and transformers has "
            f"no model_type {hf.get('model_type')!r}; {allow}"
        )
    try:
        tokenizer = read_json(directory / "tokenizer_config.json")
    except (OSError, ValueError):
        return
    if _auto_map(tokenizer) and not (directory / "tokenizer.json").is_file():
        yield (
            f"needs code of its own: auto_map in its tokenizer_config.json names {_auto_map(tokenizer)}, and "
            f"there is no tokenizer.json; {allow}"
        )


def _auto_map(hf: Any) -> str:
    """Return the classes that a JSON file names in Python files beside it."""
    names = hf.get("auto_map") if isinstance(hf, Mapping) else None
    if isinstance(names, Mapping):
        names = names.values()
    return ", ".join(str(name) for name in names) if isinstance(names, Iterable) else ""


def _is_known(model_type: Any) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _tokenizer_file(directory: Path) -> Iterator[str]:
    if not any((directory / name).is_file() for name in TOKENIZERS):
        yield f"has no tokenizer: one of {', '.join(TOKENIZERS)}"


def _weights(directory: Path) -> Iterator[str]:
    try:
        names = weight_names(directory)
    except ValueError as error:
        yield str(error)
        return
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        yield f"lacks {len(missing)} of {len(names)} weight files, the first is {missing[0]}"
    for name in names:
        if name not in missing:
            yield from _torn(directory / name)


def _torn(path: Path) -> Iterator[str]:
    """Compare the length of a safetensors file with what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                yield f"its {path.name} is a pointer of Git LFS; run `git lfs pull` there"
                return
            file.seek(0)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = parse_json(file.read(length) if length <= size else b"", strict=False)
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
        largest = max(_token_ids(read_json(path)), default=0)
    except UNREADABLE as error:
        yield f"its tokenizer.json cannot be read: {error!r}"
        return
    if isinstance(size, int) and largest >= size:
        yield f"its tokenizer.json has token ids up to {largest}, its config.json a vocab_size of only {size}"


def _token_ids(tokenizer: Mapping[str, Any]) -> Iterator[int]:
    yield from (number for number, _ in _tokens(tokenizer))


def _tokens(tokenizer: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield id and content of each token of a ``tokenizer.json``, those that were added at the end."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, Mapping):
        yield from ((number, content) for content, number in vocabulary.items())
    else:  # of a unigram model: pairs of content and score
        yield from ((number, pair[0]) for number, pair in enumerate(vocabulary))
    for token in tokenizer.get("added_tokens") or ():
        yield token["id"], token.get("content", "")


def other_tokens(directory: Path, policy: Path) -> Iterator[str]:
    """Yield tokens that mean something else to a model than to the policy.

    A token that one of them does not have is no reason. Directories without a ``tokenizer.json`` are not
    compared.
    """
    paths = [each / "tokenizer.json" for each in (directory, policy)]
    if not all(path.is_file() for path in paths):
        return
    try:
        there, here = (dict(_tokens(read_json(path))) for path in paths)
    except UNREADABLE:
        return  # a problem of its own
    differ = min((number for number in there.keys() & here if there[number] != here[number]), default=None)
    if differ is not None:
        meanings = f"token {differ} is {there[differ]!r} there and {here[differ]!r} in model.path"
        yield f"{meanings}; take a model with the policy's tokenizer"
