"""Weights that the engines have no part for, and that exports copy from the model they come from.

An export keeps the class of its model in ``config.json``. Without the tensors of a part that the class has,
such as a vision tower, transformers would load the export with random numbers there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from anygauge.engines.dequantize import open_unquantized

__all__ = ["carried_weights", "copy_carried", "warn_of_left_out"]

_log = logging.getLogger(__name__)


def carried_weights(directory: Path, prefixes: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a Hugging Face directory whose names begin so, one at a time.

    :raises CheckpointError: They cannot be read.
    """
    if not prefixes:
        return
    with open_unquantized(directory) as reader:
        for name in sorted(reader.names):
            if name.startswith(tuple(prefixes)):
                yield name, reader(name)


def copy_carried(source: Path, path: Path, prefixes: Sequence[str]) -> dict[str, int]:
    """Write the tensors of a Hugging Face directory whose names begin so into a file, if there are any.

    safetensors maps the file that it reads, so they need not be in memory together.

    :param source: May have no weights.
    :returns: Their bytes by name.
    :raises CheckpointError: They cannot be read.
    """
    if not any(source.glob("*.safetensors")):
        return {}
    tensors = dict(carried_weights(source, prefixes))
    if tensors:
        save_file(tensors, path, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def warn_of_left_out(directory: Path, counts: Mapping[str, int], carried: Sequence[str]) -> None:
    """Warn of the tensors of a checkpoint that a run has no part for.

    :param counts: Their number, by the beginning of their names.
    :param carried: Beginnings of the names of those that exports have nevertheless.
    """
    for prefix, count in sorted(counts.items()):
        saved = "here; exports have them unchanged" if prefix in carried else "here and in what is saved"
        _log.warning("%s: %d tensors (%s ...) are left out, %s", directory, count, prefix, saved)
