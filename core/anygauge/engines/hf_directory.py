"""Hugging Face directories: read the config and tensors, write a complete directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from anygauge.disk import appearing, read_json
from anygauge.hub.weight_files import copy_other_files, open_weight_file, weight_files, write_index
from anygauge_hooks.errors import AnygaugeError, CheckpointError

__all__ = [
    "FILE_BYTES",
    "PREDICTION_HEADS",
    "TensorReader",
    "config_of_weights",
    "open_files",
    "open_tensors",
    "read_config",
    "reading_config",
    "shard_names",
    "write_directory",
]

FILE_BYTES = 5_000_000_000
"""Largest file of weights, unless one tensor is larger."""
PREDICTION_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of ``config.json`` that count heads of multi-token prediction, which no family has."""
_TYPE_KEYS = frozenset(("dtype", "torch_dtype"))
_OF_SOURCE = ("quantization_config", "torch_dtype")
"""Keys that say how the source stores its weights; the second is what transformers 4 calls ``dtype``."""


def read_config(directory: Path) -> dict[str, Any]:
    """Return ``config.json``.

    :raises CheckpointError: There is none, or it is not a JSON object.
    """
    path = directory / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a Hugging Face directory: it has no config.json.",
            hint="Point model.path at a directory with config.json, a tokenizer and *.safetensors.",
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", hint="Download the file again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path} holds {type(config).__name__}, not an object.", hint="Download the file again."
        )
    return config


@contextmanager
def reading_config(directory: Path) -> Iterator[None]:
    """Say that a family asks in vain for a key of ``config.json``, or cannot use a value.

    :raises CheckpointError: The block raised what is no error of the project.
    """
    try:
        yield
    except AnygaugeError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        unset = ", ".join(key for key, value in read_config(directory).items() if value is None)
        raise CheckpointError(
            f"{directory / 'config.json'} has a value that its architecture cannot use: {error}.",
            hint=f"Compare it with that of the model; without a value are: {unset or 'none'}.",
        ) from error
    except KeyError as error:
        raise CheckpointError(
            f"{directory / 'config.json'} lacks the key {error}, which its architecture needs.",
            hint="The file is not complete: download it again.",
        ) from error


class TensorReader:
    """Reads tensors of a directory by name, each from its own file."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    @property
    def names(self) -> set[str]:
        """Return every tensor's name."""
        return set(self._files)

    def shape(self, name: str) -> Sequence[int]:
        """Return a tensor's shape without reading it."""
        shape: Sequence[int] = self._files[name].get_slice(name).get_shape()
        return shape

    def __call__(self, name: str) -> Tensor:
        """Read a tensor."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return self(name).dtype  # the file is mapped: nothing is read

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        """Read a part of a tensor."""
        tensor: Tensor = self._files[name].get_slice(name)[index]
        return tensor


@contextmanager
def open_tensors(directory: Path) -> Iterator[TensorReader]:
    """Open all safetensors files of a directory; tensors are read as they are, when asked for.

    :raises CheckpointError: As of :func:`open_files`.
    """
    with open_files(directory) as files:
        yield TensorReader(files)


@contextmanager
def open_files(directory: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the open safetensors file of each tensor of a directory, by name.

    :raises CheckpointError: There are none, one is torn or missing, two hold one tensor, or the index is
        malformed.
    """
    places: dict[str, Path] = {}
    files: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in weight_files(directory):
            handle = stack.enter_context(open_weight_file(path))
            for name in handle.keys():  # noqa: SIM118 - no mapping
                if name in places:
                    raise CheckpointError(
                        f"{directory} holds {name} twice, in {places[name].name} and in {path.name}.",
                        hint="Which one is right? Remove the other, or download the directory again.",
                    )
                places[name], files[name] = path, handle
        yield files


def write_directory(
    target: Path,
    source: Path,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    changes: Mapping[str, Any] | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a complete Hugging Face directory, atomically; it is on the disk before it has its name.

    :param target: Must not exist; appears only when it is complete.
    :param source: The directory that the model came from: its config, tokenizer, chat template and
        generation config are taken over. What its config says of weights that are not written is not.
    :param weights: Full tensors by Hugging Face name; streamed, one shard in memory at a time.
    :param dtype: Written to the config.
    :param changes: Other keys of the config that differ.
    :param check: Called with the directory before it has its name.
    :raises CheckpointError: ``target`` exists, or it cannot be written.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists.", hint="Choose another directory or remove it.")
    try:
        with appearing(target) as partial:
            copy_other_files(source, partial)
            config = config_of_weights(read_config(source), dtype) | {**(changes or {})}
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            _write_shards(partial, weights)
            if check is not None:
                check(partial)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}.",
            hint="Free space there, or choose another directory; continue the run with --resume.",
        ) from error


def config_of_weights(source: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the keys of a ``config.json`` for weights of one dtype that were exported from a model.

    They have no heads of multi-token prediction. A text model inside another says so itself, and so does
    another part that has said it before.
    """
    config = {key: value for key, value in source.items() if key not in _OF_SOURCE}
    heads = {key: 0 for key in PREDICTION_HEADS if key in config}
    for part, inside in config.items():
        if isinstance(inside, Mapping) and (part == "text_config" or _TYPE_KEYS & inside.keys()):
            config[part] = config_of_weights(inside, dtype)
    return {**config, **heads, "dtype": str(dtype).removeprefix("torch.")}


def _write_shards(directory: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(pending, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        if pending and size + tensor.nbytes > FILE_BYTES:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    names = shard_names(len(shards))
    for number, name in enumerate(names):
        (directory / f"shard-{number}").rename(directory / name)
    write_index(
        directory, {name: file for file, held in zip(names, shards, strict=True) for name in held}, total
    )


def shard_names(count: int) -> list[str]:
    """Return the names of the weight files of a directory that has so many."""
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
