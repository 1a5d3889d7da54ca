"""Weight files of a Hugging Face directory. Only safetensors are read: they contain no code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from anygauge.disk import read_json
from anygauge_hooks.errors import CheckpointError

__all__ = [
    "INDEX",
    "SINGLE",
    "copy_other_files",
    "open_weight_file",
    "weight_files",
    "weight_names",
    "write_index",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")


def weight_names(directory: Path) -> list[str]:
    """Return the names of the weight files, sorted, whether they are there or not.

    A single file comes before an index, as it does in transformers.

    :raises ValueError: There are none, or the index is none; the text says so of "the directory".
    """
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return [SINGLE]
    if not index.is_file():
        raise ValueError(f"has no safetensors weights: {SINGLE} or {INDEX}{_not_read(directory)}")
    try:
        names = set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its {INDEX} cannot be read: {error!r}") from error
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong or not names:
        what = f"{wrong[0]!r}, which is not a file of this directory" if wrong else "no file"
        raise ValueError(f"its {INDEX} names {what}")
    return sorted(names)


def _not_read(directory: Path) -> str:
    """Return which weights of another format a directory has, as the end of a clause."""
    names = sorted(path.name for path in directory.iterdir() if path.suffix in _WEIGHT_SUFFIXES[1:])
    return f"; {names[0]} is not read: save the model with transformers' save_pretrained" if names else ""


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a Hugging Face directory.

    :raises CheckpointError: There are none, the index is malformed, or a file that it names is missing.
    """
    try:
        names = weight_names(directory)
    except ValueError as error:
        raise CheckpointError(
            f"{directory} {error}.",
            hint="Download the directory again; transformers' save_pretrained converts other formats.",
        ) from error
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{directory} lacks {', '.join(absent)}, which {INDEX} names.", hint="Complete the download."
        )
    return [directory / name for name in names]


def open_weight_file(path: Path) -> Any:
    """Open a weight file; tensors are read when asked for.

    :raises CheckpointError: It is torn or no such file.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}.", hint="Download or copy the file again."
        ) from error


def copy_other_files(source: Path, target: Path) -> None:
    """Copy every file of a Hugging Face directory that holds no weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)


def write_index(directory: Path, weight_map: Mapping[str, str], size: int) -> None:
    """Write the index from tensor names to files.

    :param weight_map: File by tensor.
    :param size: Size of all tensors, in bytes.
    """
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
