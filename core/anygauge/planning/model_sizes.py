"""Sizes of a model from its directory: ``config.json``, and the headers of its weight files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from anygauge.disk import read_json
from anygauge.hub.weight_files import weight_names
from anygauge.planning.shape import ModelShape, read_shape
from anygauge.strict_json import parse_json
from anygauge_hooks.errors import ConfigError

__all__ = ["model_shape", "read_config"]

LENGTH_BYTES = 8
"""Size of the length field at the start of a safetensors file."""
EXPLAINED = 0.01
"""Part of the stored parameters that small tensors, such as biases and norms of heads, may have."""


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of a model's ``config.json``.

    :raises ConfigError: It cannot be read.
    """
    try:
        hf = read_json(directory / "config.json")
        if not isinstance(hf, dict):
            raise ValueError("it is not an object")
        return hf
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"A plan needs the sizes of {directory}, whose config.json cannot be read: {reason}.",
            hint="Name a Hugging Face directory, or a model that is in the cache.",
        ) from error


def model_shape(directory: Path, hf: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of a model.

    :param directory: Where its weight files are, if they are here.
    :param hf: Content of its ``config.json``.
    :raises ConfigError: It lacks a size.
    """
    shape = read_shape(hf)
    stored = _stored_parameters(directory)
    if stored - shape.parameters <= EXPLAINED * stored:
        return shape
    return read_shape(hf, stored_parameters=stored)


def _stored_parameters(directory: Path) -> int:
    """Return how many numbers the weight files have; 0 if they are not all here."""
    try:
        files = [directory / name for name in weight_names(directory)]
        return sum(prod(shape) for file in files for shape in _shapes(file))
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _shapes(file: Path) -> Iterator[list[int]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        header: Mapping[str, Any] = parse_json(stream.read(length), strict=False)
    yield from (tensor["shape"] for name, tensor in header.items() if name != "__metadata__")
