"""Hugging Face directories: read the config and tensors, write a complete directory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anygauge.hub.weight_files import INDEX, weight_files
from anygauge_hooks.errors import CheckpointError

__all__ = ["TensorReader", "copy_other_files", "open_tensors", "read_config", "write_directory"]

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")


def read_config(directory: Path) -> dict[str, Any]:
    """Return ``config.json``.

    :raises CheckpointError: There is none, or it is no JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is no Hugging Face directory: it has no config.json.",
            hint="Point model.path at a directory with config.json, a tokenizer and *.safetensors.",
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}.", hint="Download the file again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{path} holds {type(config).__name__}, not an object.", hint="Download the file again."
        )
    return config


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


@contextmanager
def open_tensors(directory: Path) -> Iterator[TensorReader]:
    """Open all safetensors files of a directory; tensors are read when asked for.

    :raises CheckpointError: There are none, one is torn or missing, or the index is malformed.
    """
    handles: list[Any] = []
    files: dict[str, Any] = {}
    try:
        for path in weight_files(directory):
            handle = _open(path)
            handles.append(handle)
            files.update(dict.fromkeys(handle.keys(), handle))
        yield TensorReader(files)
    finally:
        for handle in handles:
            handle.__exit__(None, None, None)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt").__enter__()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}.", hint="Download or copy the file again."
        ) from error


def write_directory(
    target: Path,
    source: Path,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a complete Hugging Face directory, atomically; it is on the disk before it has its name.

    :param target: Must not exist; appears only when it is complete.
    :param source: The directory that the model came from: its config, tokenizer, chat template and
        generation config are taken over.
    :param weights: Full tensors by Hugging Face name; streamed, one shard in memory at a time.
    :param dtype: Written to the config.
    :raises CheckpointError: ``target`` exists, or it cannot be written.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists.", hint="Choose another directory or remove it.")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        copy_other_files(source, partial)
        config = read_config(source) | {"dtype": str(dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)  # the name that transformers 4 gave the key
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_shards(partial, weights, shard_bytes)
        _to_disk(partial)
        partial.rename(target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}.",
            hint="Free space there, or choose another directory; a run goes on with --resume.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _to_disk(directory: Path) -> None:
    for path in (*directory.iterdir(), directory):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_other_files(source: Path, target: Path) -> None:
    """Copy every file of a Hugging Face directory that holds no weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)


def _write_shards(directory: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        save_file(pending, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    names = _shard_names(len(shards))
    for number, name in enumerate(names):
        (directory / f"shard-{number}").rename(directory / name)
    weight_map = {name: file for file, held in zip(names, shards, strict=True) for name in held}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
